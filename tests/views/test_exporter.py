"""What Prometheus gets to see: series of a run, from its rows and its states."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from runs import small_config

from flowgrpo_ray.config import load
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.run_dir.metrics import METRICS, named
from flowgrpo_ray.views.exporter import Exporter, PrometheusServer, served
from flowgrpo_ray.views.status import PoolStatus, RunStatus


class Series:
    """A sink that keeps the value of every series, by name and the labels other than the run's."""

    def __init__(self):
        self.values = {}

    def set(self, metric, labels, value):
        assert metric.kind == "gauge" and labels["run"] == "run" and labels["run_id"] == "1a2b"
        assert tuple(labels) == ("run", "run_id", *metric.labels)
        self.values[(metric.name, *list(labels.values())[2:])] = value

    def add(self, metric, labels, amount):
        assert metric.kind == "counter" and amount >= 0
        assert tuple(labels) == ("run", "run_id", *metric.labels)
        key = (metric.name, *list(labels.values())[2:])
        self.values[key] = self.values.get(key, 0.0) + amount


def exporter(tmp_path, overrides=None, now=1000.0, **kwargs):
    series, clock = Series(), [now]
    made = Exporter(small_config(tmp_path, "run", overrides=overrides), "1a2b", [series], clock=lambda: clock[0], **kwargs)
    return made, series.values, clock


def test_counters_start_as_0(tmp_path):
    _, values, _ = exporter(tmp_path)
    counters = {metric.name: metric for metric in METRICS if metric.kind == "counter"}
    assert {name for name, *_ in values if name in counters} == counters.keys()
    assert all(value == 0 for (name, *_), value in values.items() if name in counters)
    assert values["actor_deaths", "rollout"] == values["actors_replaced", "reward.jpeg_compressibility", "timeout"] == 0
    assert values["waiting_seconds", "learner"] == values["scoring_failures", "jpeg_compressibility"] == 0
    assert values["phase", "rebuilding"] == 0


def test_a_row_becomes_series(tmp_path):
    export, values, clock = exporter(tmp_path)
    row = {"step": 1, "images": 16.0, "masked_samples": 2.0, "time_sync": 0.5, "reward_mean/ocr": 0.25, "updates": 2.0,
           "actor_deaths/rollout": 1.0}
    export.row({"step": 0, "eval/ema/ocr": 0.5})
    assert values["eval", "ema", "ocr"] == 0.5 and values["steps_committed",] == 0 and values["last_step_timestamp",] == 1000
    clock[0] = 1010.0
    export.row(row)
    assert values["reward_mean", "ocr"] == 0.25 and values["updates",] == 2 and values["actor_deaths", "rollout"] == 1
    assert values["step",] == values["steps_committed",] == 1 and values["last_step_timestamp",] == 1010
    assert values["images_made",] == 16 and values["images_without_score",] == 2 and values["sync_seconds",] == 0.5
    clock[0] = 1030.0
    export.row({"step": 2, "stopped": 1.0, "actor_deaths/rollout": 17.0})
    assert values["actor_deaths", "rollout"] == 17, "counters of rows are totals"
    assert values["step",] == 1 and values["last_step_timestamp",] == 1010, "the step was not finished"
    assert ("stopped",) not in values


def test_a_resumed_run_counts_on_from_0(tmp_path):
    export, values, clock = exporter(tmp_path, step=20)
    clock[0] = 1500.0  # the actors took their time
    export.go_on_from({"step": 20, "updates": 40.0, "actor_deaths/rollout": 3.0, "kl": 0.1})
    assert values["step",] == values["checkpoint_step",] == 20 and values["updates",] == 0
    assert values["last_step_timestamp",] == 1500
    export.row({"step": 21, "updates": 42.0, "actor_deaths/rollout": 3.0})
    assert values["updates",] == 2 and values["actor_deaths", "rollout"] == 0 and values["steps_committed",] == 1


def status(**kwargs):
    return RunStatus(**{"run": "run", "run_id": "1a2b", "run_dir": "", "phase": "sampling", "step": 3, "steps": 9,
                        "version": 3} | kwargs)


def test_a_state_becomes_series(tmp_path):
    export, values, _ = exporter(tmp_path)
    pool = PoolStatus(target=4, ready=2, starting=1, busy=1, queued=7, counts={"deaths": 2, "timeouts": 1})
    state = status(queue={"scoring": 2}, pools={"rollout": pool}, waiting_s={"learner": 2.5}, checkpoint_step=2,
                   checkpoint_time=940.0, checkpoint_bytes=512, seconds_left=90.0, object_store_bytes=64)
    for _ in range(2):
        export.status(state)
    assert values["phase", "sampling"] == 1 and values["phase", "learning"] == 0
    assert [values[f"pool_{what}", "rollout"] for what in ("target", "ready", "starting", "busy", "draining", "queue")] == \
        [4, 2, 1, 1, 0, 7]
    assert values["actors_replaced", "rollout", "died"] == 2 and values["actors_replaced", "rollout", "timeout"] == 1
    assert values["waiting_seconds", "learner"] == 2.5, "states hold totals"
    assert values["queue_groups", "scoring"] == 2 and values["queue_groups", "sampling"] == 0
    assert values["checkpoint_step",] == 2 and values["checkpoint_age",] == 60 and values["checkpoint_bytes",] == 512
    assert values["seconds_left",] == 90 and values["object_store_held",] == 64 and values["policy_version",] == 3
    export.status(status(phase="stopping"))
    assert values["phase", "sampling"] == 0 and values["phase", "stopping"] == 1
    export.sync_failed()
    assert values["sync_failures",] == 1


@pytest.mark.parametrize("overrides, tolerance", [
    ({}, 0.0), ({"train.ratio_tolerance": 0.01}, 0.01), ({"model.dtype": "bfloat16"}, 5e-4),
    ({"pools.learner.num_gpus": 1.0}, 5e-4)])
def test_the_tolerance_is_the_learners(tmp_path, overrides, tolerance):
    assert exporter(tmp_path, overrides)[1]["ratio_tolerance",] == tolerance


def test_every_metric_has_a_kind_a_unit_and_a_meaning():
    assert all(metric.unit and metric.description and metric.kind in ("gauge", "counter") for metric in METRICS)
    assert named("pool_ready").labels == ("pool",) and not named("pool_ready").recorded


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_the_port_serves_the_table(tmp_path):
    port = free_port()
    with served(port) as sinks:
        export = Exporter(small_config(tmp_path, "run"), "1a2b", sinks)
        export.row({"step": 1, "reward_mean/jpeg_compressibility": 0.25, "updates": 2.0})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    reward = families["flowgrpo_reward_mean"]
    assert reward.type == "gauge" and reward.documentation == "Mean score of the step's valid samples [score]"
    (sample,) = reward.samples
    assert sample.labels == {"run": "run", "run_id": "1a2b", "reward": "jpeg_compressibility"} and sample.value == 0.25
    counter = families["flowgrpo_updates"]
    assert counter.type == "counter"
    assert {s.name: s.value for s in counter.samples}["flowgrpo_updates_total"] == 2
    with socket.create_server(("127.0.0.1", port)):
        pass  # free again


def test_a_taken_port_is_named():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"logging.prometheus_port is {port}, and port {port} of this machine cannot "
                                              r"be used \(Address already in use\); choose another port"):
            PrometheusServer(port)
    with served(None) as sinks:
        assert sinks == []
    with pytest.raises(ConfigError, match="prometheus_port"):
        load(None, {"logging.prometheus_port": 0})
