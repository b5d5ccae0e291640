"""Which run a command means, and what it shows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from command import cli

from flowgrpo_ray.cluster import reach
from flowgrpo_ray.cluster.commands import parse_targets
from flowgrpo_ray.cluster.reach import GoneError, LocalRay, Run, find, full_name
from flowgrpo_ray.cluster.show import runs_text, status_text
from flowgrpo_ray.errors import ConfigError, ResourceError
from flowgrpo_ray.views.status import PoolStatus, RunStatus


def state(run: str = "first", run_id: str = "1a2b", run_dir: str = "/data/runs/first", **values) -> RunStatus:
    return RunStatus(**{"run": run, "run_id": run_id, "run_dir": run_dir, "phase": "sampling", "step": 12, "steps": 30,
                        "version": 12, "time": 1000.0, "started": 800.0, **values})


@pytest.fixture
def runs(monkeypatch):
    """The runs of a cluster: what `find` is given."""
    there = [Run(None, state(), 0.0), Run(None, state("second", "3c4d", "s3://bucket/runs/second"), 0.0),
             Run(None, state("second", "5e6f", "/elsewhere/second"), 0.0)]
    monkeypatch.setattr(reach, "living", lambda: there)
    return there


@pytest.mark.parametrize(("name", "run_id"), [
    ("first", "1a2b"), ("3c4d", "3c4d"), ("s3://bucket/runs/second", "3c4d"), ("s3://bucket/runs/second/", "3c4d"),
    ("/data/runs/../runs/first", "1a2b")])
def test_a_run_is_found_by_name_run_id_or_directory(runs, name, run_id):
    assert find(full_name(name), wait_s=0).status.run_id == run_id


def test_a_relative_directory_is_that_of_this_machine(monkeypatch):
    monkeypatch.chdir("/")
    assert full_name("data/runs/first") == "/data/runs/first" and full_name("first") == "first"


def test_two_runs_of_one_name_are_listed(runs):
    with pytest.raises(ConfigError) as error:
        find("second", wait_s=0)
    assert str(error.value).splitlines() == [
        "2 runs are named 'second'; give the run id or the run directory of one:",
        "  3c4d  s3://bucket/runs/second", "  5e6f  /elsewhere/second"]


def test_a_run_that_does_not_answer_is_looked_for_a_while_and_then_said_to_be_gone(runs, monkeypatch):
    slept = []
    monkeypatch.setattr(reach.time, "sleep", slept.append)
    monkeypatch.setattr(reach.time, "monotonic", lambda: float(len(slept)))
    with pytest.raises(GoneError, match=r"no run 'third' answers; the runs that answer here are first \(/data/runs/first\), .*"
                                        "`ray job list` shows it.*newest checkpoint is in RUN_DIR/checkpoints"):
        find("third", wait_s=3)
    assert len(slept) == 3
    monkeypatch.setattr(reach.time, "sleep", lambda _: runs.append(Run(None, state("third", "7a8b", "/data/third"), 0.0)))
    assert find("third", wait_s=3).status.run_id == "7a8b", "its control actor was made again meanwhile"


@pytest.mark.parametrize(("targets", "message"), [
    (["rollout"], "'rollout': expected POOL=NUMBER"), (["rollout=many"], "expected POOL=NUMBER"),
    (["rollout=2", "rollout=3"], "rollout is given twice"), ([], "nothing to scale")])
def test_targets_of_another_form_are_rejected(targets, message):
    with pytest.raises(ConfigError, match=message):
        parse_targets(targets)
    assert parse_targets(["rollout=8", "reward.ocr=4"]) == {"rollout": 8, "reward.ocr": 4}


def test_the_state_of_a_run_as_text():
    pools = {"rollout": PoolStatus(8, ready=6, starting=2, busy=3, queued=4, counts={"deaths": 1},
                                   nodes={"10.0.0.5": 5, "10.0.0.6": 1})}
    text = status_text(state(
        images_per_s=57.34, seconds_left=250.0, waiting_for="step 13", waiting_s={"rollout": 31.0, "learner": 90.0},
        queue={"encoding": 0, "sampling": 2, "scoring": 1, "learning": 1}, checkpoint_step=10, checkpoint_time=875.0,
        checkpoint_bytes=5_400_000, pools=pools), age_s=12.0)
    assert text.splitlines() == [
        "note        the driver told this 12 s ago; it is busy, or hangs",
        "run         first (run id 1a2b), since 3 min 20 s",
        "directory   /data/runs/first",
        "phase       sampling; step 12 of 30 done, policy version 12",
        "rate        57.3 images/s, about 4 min 10 s left",
        "waits for   step 13",
        "waited      learner 1 min 30 s, rollout 31 s",
        "queue       encoding 0, sampling 2, scoring 1, learning 1 (groups)",
        "checkpoint  step 10, 2 min 5 s ago, 5.4 MB",
        "",
        "pool     target  ready  starting  draining  busy  queued  deaths  nodes",
        "rollout  8       6      2         0         50%   4       1       10.0.0.5 (5), 10.0.0.6"]
    first = status_text(state(step=0, phase="starting"))
    assert "none yet" in first and "no step finished yet" in first and "left" not in first


def test_runs_as_a_table():
    assert runs_text([]) == "no run answers here"
    lines = runs_text([state()]).splitlines()
    assert lines[0].split() == ["run", "run", "id", "step", "phase", "age", "directory"]
    assert lines[1].startswith("first  1a2b    12/30  sampling") and lines[1].endswith("/data/runs/first")


# Which Ray ------------------------------------------------------------------------------------------------------------

def test_without_an_address_it_is_the_one_ray_of_this_machine_with_the_token_that_it_was_started_with(monkeypatch):
    here = [LocalRay("10.0.0.1:6379", "flowgrpo-ray train a.yaml", "secret")]
    monkeypatch.setattr(reach, "local_rays", lambda: here)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    assert reach._choose(None) == "10.0.0.1:6379" and reach.os.environ["RAY_AUTH_TOKEN"] == "secret"
    here.append(LocalRay("10.0.0.1:6380", "ray start", None))
    with pytest.raises(ConfigError, match="2 Rays run on this machine; which one") as error:
        reach._choose(None)
    assert "--address 10.0.0.1:6379   (flowgrpo-ray train a.yaml)" in str(error.value)
    assert "secret" not in str(error.value)
    assert reach._choose("10.0.0.1:6380") == "10.0.0.1:6380"
    here.append(LocalRay("10.0.0.1:6381", "ray start", None, frozenset({"first", "second"})))
    assert reach._choose(None, "first") == "10.0.0.1:6381"
    with pytest.raises(ConfigError, match="3 Rays"):
        reach._choose(None, "third")
    here.append(LocalRay("10.0.0.1:6382", "ray start", None, frozenset({"first"})))
    with pytest.raises(ConfigError, match="4 Rays"):
        reach._choose(None, "first")
    here.clear()
    with pytest.raises(ConfigError, match="no Ray runs on this machine: give --address"):
        reach._choose(None)
    with pytest.raises(ResourceError, match="cannot connect to 10.0.0.9:6379.*--address http://HOST:8265"):
        reach._choose("10.0.0.9:6379")


def test_no_ray_is_an_error_and_none_is_started(monkeypatch):
    monkeypatch.setattr(reach, "local_rays", list)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for args in (["status", "first"], ["runs"], ["scale", "first", "rollout=2"], ["checkpoint", "first"], ["stop", "first"]):
        assert "no Ray runs on this machine" in cli(*args, code=2).output
    assert "expected POOL=NUMBER" in cli("scale", "first", "rollout", code=2).output


def test_a_run_is_shown_as_json(runs, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert json.loads(cli("status", "first", "--json").output)["run_id"] == "1a2b"
    assert [run["run"] for run in json.loads(cli("runs", "--json").output)] == ["first", "second", "second"]


def test_the_last_of_its_replies_is_a_command_s_exit_code(runs, monkeypatch):
    import ray

    replies = [{"text": "follows", "code": 0, "final": False}, {"text": "refused", "code": 2, "final": True}]
    asked = []

    def ask(id, command, args, number):
        asked.append((command, args, number))
        return replies[number]

    said_goodbye = []
    actor = SimpleNamespace(ask=SimpleNamespace(remote=ask), goodbye=SimpleNamespace(remote=said_goodbye.append))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)
    runs[0] = Run(actor, state(), 0.0)
    assert cli("stop", "first", "--now", code=2).output.splitlines() == ["follows", "refused"]
    assert asked == [("stop", {"now": True}, 0), ("stop", {"now": True}, 1)] and len(said_goodbye) == 1
