"""Runs that share a cluster never meet, and each stays on the nodes that its labels name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest
from cluster_runs import Training, flowgrpo_ray, output
from clusters import Nodes
from pending_demand import idle, pending
from runs import assert_same_bits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LEARNER, ROLLOUT, MORE = "127.0.0.2", "127.0.0.3", "127.0.0.4"  # the nodes that are added, in this order
ON_THEIR_NODES = (
    "pools.learner.label_selector={pool: learner}",
    "pools.rollout.label_selector={pool: rollout}",
    "pools.reward.jpeg_compressibility.label_selector={pool: '!rollout'}",
)


@pytest.fixture(scope="module")
def head() -> Iterator[Nodes]:
    """A head without CPUs, and a node for each of two labels."""
    nodes = Nodes()
    try:
        nodes.start_head(0)
        nodes.add(4, pool="learner")
        nodes.add(4, pool="rollout")
        yield nodes
    finally:
        nodes.stop()


@pytest.fixture
def connected(head) -> Iterator[None]:
    """This process as a driver that can look at the whole cluster."""
    import ray

    ray.init(address=head.address, log_to_driver=False)
    yield
    ray.shutdown()


def status(head: Nodes, training: Training) -> dict:
    args = ("status", training.run_dir, "--json", "--address", head.address)
    return json.loads(output(flowgrpo_ray(head, training.run_dir.parent, *args))[0])


def left() -> dict[str, object]:
    """What the runs of the cluster hold: actors by name, placement groups, CPUs."""
    import ray
    from ray.util import placement_group_table

    actors = ray.util.list_named_actors(all_namespaces=True)
    groups = [group["state"] for group in placement_group_table().values()]
    used = ray.cluster_resources()["CPU"] - ray.available_resources()["CPU"]
    return {"actors": Counter(actor["name"] for actor in actors if actor["namespace"].startswith("flowgrpo")),
            "groups": len(groups) - groups.count("REMOVED"), "CPU": round(used, 3)}


def of_run(training: Training, run_id: str) -> dict[str, object]:
    name = training.run_dir.name
    names = [f"{name}/learner-0", f"{name}/reward.jpeg_compressibility-0", f"{name}/rollout-0",
             f"flowgrpo-control-{run_id}"]
    return {"actors": Counter(names), "groups": 1, "CPU": 0.3}


def test_runs_that_die_or_stop_leave_nothing_behind_and_no_other_run_changed(head, connected, tmp_path):
    """Three at once: of one name in two directories, and one of another name."""
    kept, killed, stopped = (Training(head, tmp_path / folder, name, "run.steps=5000")
                             for folder, name in (("a", "same"), ("b", "same"), ("a", "other")))
    for training in (kept, killed, stopped):
        training.until_step(2)
    ids = {training: status(head, training)["run_id"] for training in (kept, killed, stopped)}
    assert len(set(ids.values())) == 3
    kept.until(lambda: left()["actors"].total() == 12)

    killed.process.kill()
    killed.process.wait()
    out, _ = output(flowgrpo_ray(head, tmp_path, "stop", "other", "--address", head.address))
    assert out.splitlines()[-1].startswith("stopped on request at step ")
    assert stopped.ended().splitlines()[-1].endswith(out.splitlines()[-1])
    kept.until(lambda: left() == of_run(kept, ids[kept]))

    kept.until_step(kept.step + 3)
    output(flowgrpo_ray(head, tmp_path, "stop", "same", "--address", head.address))
    kept.ended()
    alone = Training(head, tmp_path, "alone", f"run.steps={kept.step}")
    alone.ended()
    assert_same_bits(kept.adapter(), alone.adapter())


def test_actors_stay_on_the_nodes_of_their_labels_and_wait_for_room_there_as_demand(head, tmp_path):
    """Rollout 1 -> 4 with room for two, a node for one more joins, and back to 1."""
    training = Training(head, tmp_path, "labelled", "run.steps=5000", "pools.rollout.num_cpus=2", *ON_THEIR_NODES)
    wanted = ({"CPU": 2.0}, {"pool": ["rollout"]})

    def scale(rollout: int) -> str:
        command = ("scale", "labelled", f"rollout={rollout}", "--address", head.address)
        return output(flowgrpo_ray(head, tmp_path, *command))[0]

    def until_ready(rollout: int) -> None:
        training.until(lambda: status(head, training)["pools"]["rollout"]["ready"] == rollout)

    training.until_step(1)
    assert f"nodes: reward.jpeg_compressibility {LEARNER} x1; rollout {ROLLOUT} x1; learner {LEARNER} x1" in training.log
    assert pending(head) == []
    assert "rollout: 1 -> 4 actors. Not all of the new ones fit now" in scale(4)
    training.until(lambda: pending(head) == [(*wanted, 2)])
    until_ready(2)
    training.until_step(training.step + 2)
    assert pending(head) == [(*wanted, 2)], "steps go on, and the others are still wanted"
    head.add(2, pool="rollout")
    until_ready(3)
    nodes = {name: pool["nodes"] for name, pool in status(head, training)["pools"].items()}
    assert nodes == {"learner": {LEARNER: 1}, "rollout": {ROLLOUT: 2, MORE: 1},
                     "reward.jpeg_compressibility": {LEARNER: 1}}
    assert pending(head) == [(*wanted, 1)]
    assert scale(1) == "rollout: 4 -> 1 actor\n"
    training.until(lambda: pending(head) == [] and MORE in idle(head))
    assert status(head, training)["pools"]["rollout"]["nodes"] == {ROLLOUT: 1}
    output(flowgrpo_ray(head, tmp_path, "stop", "labelled", "--now", "--address", head.address))
    training.ended()


def test_a_label_that_no_node_has_ends_the_run_before_any_actor_starts(head, tmp_path):
    training = Training(head, tmp_path, "nowhere", "pools.start_timeout_s=3600",
                        "pools.rollout.label_selector={pool: rolout}")
    last = training.ended(code=1).splitlines()[-1]
    assert "no node has the labels pool=rolout (pools.rollout.label_selector)" in last
    assert f"{LEARNER}: pool=learner" in last and f"{ROLLOUT}: pool=rollout" in last
    assert "pools.autoscaling: true waits" in last and "starting" not in training.log
