"""Commands to a run on a cluster, as other processes give them: at the head's address, and through its dashboard."""

from __future__ import annotations

import json

import pytest
from cluster_runs import Training, flowgrpo_ray, output
from clusters import Nodes, free_port
from runs import assert_same_bits

from flowgrpo_ray.run_dir.checkpoint import latest

pytestmark = pytest.mark.timeout(600)  # many commands, and each starts as a process of its own


@pytest.fixture(scope="module")
def head():
    """A head with a dashboard, and the URL of that."""
    nodes, port = Nodes(), free_port()
    try:
        nodes.start_head(4, dashboard_port=port)
        nodes.url = f"http://127.0.0.1:{port}"
        yield nodes
    finally:
        nodes.stop()


@pytest.mark.slow
def test_a_run_is_seen_scaled_saved_and_stopped_from_other_processes(head, tmp_path):
    training = Training(head, tmp_path, "told", "run.steps=1000")
    training.until_step(1)

    def here(*args: str, code: int = 0) -> tuple[str, str]:
        return output(flowgrpo_ray(head, tmp_path, *args, "--address", head.address), code)

    def through_dashboard(*args: str, code: int = 0) -> tuple[str, str]:
        return output(flowgrpo_ray(head, tmp_path, *args, "--address", head.url), code)

    run_dir = str(tmp_path / "runs/told")
    for way in (here, through_dashboard):
        out, err = way("status", "told", "--json")
        status = json.loads(out)
        assert err == "" and (status["run"], status["run_dir"], status["steps"]) == ("told", run_dir, 1000)
        assert status["step"] >= 1 and status["pools"]["rollout"]["target"] in (1, 2)
        assert run_dir in way("runs")[0]
        assert "rollout" in way("status", "runs/told")[0], "its directory, relative to where the command is given"
        out, err = way("scale", "told", "rollout=2")
        assert "rollout" in out and err == ""
        out, err = way("scale", "told", "learner=2", code=2)
        assert "pools.learner.replicas" in out + err
        out, _ = way("checkpoint", "told")
        assert f"{run_dir}/checkpoints/step_" in out.splitlines()[-1]
    assert latest(run_dir).step >= 1
    status = json.loads(here("status", "told", "--json")[0])
    assert status["pools"]["rollout"]["target"] == 2

    watching = flowgrpo_ray(head, tmp_path, "status", "told", "--watch", "--json", "--address", head.url)
    assert json.loads(watching.stdout.readline())["phase"] != "ended"
    out, _ = through_dashboard("stop", "told")
    assert out.splitlines()[-1].startswith("stopped on request at step ")
    seen, _ = output(watching)
    last = json.loads(seen.splitlines()[-1])
    assert last["phase"] == "ended" and last["step"] == latest(run_dir).step
    assert training.ended().splitlines()[-1].endswith(out.splitlines()[-1]), "the run's last line"
    assert "no run answers here" in here("runs")[0]
    _, err = here("status", "told", code=1)
    assert "no run 'told' answers" in err and "newest checkpoint" in err and "Traceback" not in err

    undisturbed = Training(head, tmp_path, "undisturbed", f"run.steps={last['step']}")
    undisturbed.ended()
    assert_same_bits(training.adapter(), undisturbed.adapter())


@pytest.mark.slow
def test_a_run_that_is_stopped_now_and_two_runs_of_one_name(head, tmp_path):
    trainings = [Training(head, tmp_path / folder, "same", "run.steps=1000") for folder in ("a", "b")]
    for training in trainings:
        training.until_step(1)
    _, err = output(flowgrpo_ray(head, tmp_path, "status", "same", "--address", head.address), 2)
    assert "2 runs are named 'same'" in err and f"{tmp_path}/a/runs/same" in err and f"{tmp_path}/b/runs/same" in err
    for folder, training in zip(("a", "b"), trainings, strict=True):
        out, _ = output(flowgrpo_ray(head, tmp_path, "stop", f"{folder}/runs/same", "--now", "--address", head.address))
        assert out.splitlines()[0] == "the run stops now"
        assert "stopped on request at step " in training.ended().splitlines()[-1]
        assert latest(f"{tmp_path}/{folder}/runs/same").step >= 1
