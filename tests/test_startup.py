"""What makes the way from the command to the first image short."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys

import pytest
from ray._private.node import Node
from runs import small_config

from actors import head
from actors.placement import actor_options, shared_env
from flowgrpo_ray import startup

CHECKED = """
import sys
import flowgrpo_ray.cli.main, actors.run
from flowgrpo_ray.config import load
from flowgrpo_ray.preflight import check
check(load({config!r}))
print(sorted({{"torch", "diffusers", "transformers", "peft", "matplotlib"}} & set(sys.modules)))
"""


def test_driver_imports_no_model_library_before_it_starts_actors():
    done = subprocess.run([sys.executable, "-c", CHECKED.format(config="configs/tiny_ocr.yaml")], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "[]\n", (done.stdout, done.stderr)


def test_garbage_collection_pauses_while_libraries_load():
    assert gc.isenabled()
    with startup.loading():
        assert not gc.isenabled()
        with startup.loading():
            pass
        assert not gc.isenabled(), "the outer one still loads"
    assert gc.isenabled()
    with pytest.raises(ImportError), startup.loading():
        raise ImportError
    assert gc.isenabled()


def test_a_phase_is_reported_once(caplog, monkeypatch):
    monkeypatch.setattr(startup, "_reached", set())
    with caplog.at_level(logging.INFO, "flowgrpo_ray.startup"):
        startup.reached("Ray")
    with caplog.at_level(logging.DEBUG, "flowgrpo_ray.startup"):
        startup.reached("Ray")
        startup.reached("Ray")
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("Ray: ")


def test_actors_need_no_runtime_env_for_variables_that_the_head_gives_all_workers(tmp_path, monkeypatch):
    """Ray keeps workers without one ready; each other one waits for Ray's runtime_env agent."""
    config = small_config(tmp_path, "shared", overrides={"pools.rollout.env": {"A": "1"}})
    pools, env = config.pools, shared_env(config)
    assert env == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    everything = actor_options(pools.rollout, "x")["runtime_env"]["env_vars"]
    assert everything == env | {"A": "1"}, "a Ray that was not started here gives nothing"
    monkeypatch.setattr(head, "worker_env", env)
    assert actor_options(pools.rollout, "x")["runtime_env"] == {"env_vars": {"A": "1"}}
    assert actor_options(pools.learner, "x")["runtime_env"] == {}
    assert actor_options(pools.learner, "x", cpu_threads=2)["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"


def test_a_head_on_this_machine_starts_no_process_that_it_does_without(monkeypatch):
    calls = []
    monkeypatch.setattr(Node, "start_monitor", lambda self: calls.append("monitor"))
    monkeypatch.setattr(Node, "start_api_server", lambda self, **options: calls.append("dashboard"))
    monkeypatch.setattr(Node, "start_log_monitor", lambda self: calls.append("log monitor"))

    def start_all() -> list[str]:
        calls.clear()
        Node.start_monitor(None)
        Node.start_api_server(None, include_dashboard=False, raise_on_failure=False)
        Node.start_log_monitor(None)
        return list(calls)

    assert len(start_all()) == 3
    for options, left in (({"include_dashboard": False, "log_to_driver": False}, []),
                          ({"include_dashboard": True, "log_to_driver": False}, ["monitor", "dashboard"]),
                          ({"include_dashboard": False, "log_to_driver": True}, ["log monitor"])):
        with head._without(*head._unneeded(options)):
            assert start_all() == left
        assert len(start_all()) == 3
    with head._without("of_another_version"):
        assert len(start_all()) == 3


def test_the_installed_ray_starts_its_processes_by_these_names():
    assert {"start_monitor", "start_api_server", "start_log_monitor"} <= vars(Node).keys()


def test_gpu_actors_do_not_inherit_that_there_are_no_gpus(tmp_path):
    config = small_config(tmp_path, "gpus", overrides={"pools.learner.num_gpus": 1})
    assert "CUDA_VISIBLE_DEVICES" not in shared_env(config)
