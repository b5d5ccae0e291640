"""Why a cluster cannot hold a run: the pool, the nearest node, labels, and the runs that hold the rest."""

import pytest

from actors.fitting import Node, holders, impossible, scattered
from flowgrpo_ray.config.schema import PoolConfig


def node(address, cpu, gpu=0.0, free=None, **labels):
    total = {"CPU": cpu, "GPU": gpu}
    return Node(address, total, {"CPU": cpu if free is None else free, "GPU": gpu}, labels)


SMALL, LARGE = node("10.0.0.1", 4, pool="reward-cpu"), node("10.0.0.2", 16, 8, pool="rollout")


def test_what_no_node_has_names_the_pool_and_the_nearest_node():
    pools = {"learner": PoolConfig(num_cpus=2, num_gpus=1), "rollout": PoolConfig(num_cpus=32, num_gpus=1)}
    assert impossible(pools, [SMALL, LARGE]) == (
        "an actor of pools.rollout asks for CPU 32, GPU 1, and no node has that; the nearest is 10.0.0.2: CPU 16, GPU 8")


def test_only_nodes_with_the_labels_of_the_pool_count():
    pools = {"reward.ocr": PoolConfig(num_cpus=8, label_selector={"pool": "reward-cpu"})}
    assert "no node with its labels has that; the nearest is 10.0.0.1: CPU 4" in impossible(pools, [SMALL, LARGE])
    pools["reward.ocr"].label_selector = {"pool": "rewards"}
    text = impossible(pools, [SMALL, LARGE])
    assert "no node has the labels pool=rewards (pools.reward.ocr.label_selector)" in text
    assert "10.0.0.1: pool=reward-cpu; 10.0.0.2: pool=rollout" in text


@pytest.mark.parametrize("wanted, fits", [
    ("rollout", True), ("!rollout", False), ("in(rollout, learner)", True), ("!in(rollout,learner)", False), ("x", False)])
def test_selectors_of_ray(wanted, fits):
    assert LARGE.has({"pool": wanted}) == fits


def test_actors_that_fit_one_by_one_are_shown_what_is_free():
    pools = {"rollout": PoolConfig(num_cpus=3)}
    busy = node("10.0.0.3", 4, free=0.5)
    assert impossible(pools, [busy]) == ""
    assert scattered(pools.values(), [busy]).endswith("do not fit all actors (10.0.0.3: CPU 0.5 free of 4, GPU 0)")


def test_runs_that_hold_actors_are_named_with_their_pools():
    mine = {"namespace": "flowgrpo-first-1a2b-3c"}
    other = {"namespace": "flowgrpo-second-9f-77"}
    names = [mine | {"name": "first/rollout-0"}, mine | {"name": "first/rollout-1.2"}, mine | {"name": "first/reward.ocr-0"},
             other | {"name": "second/learner-0"}, {"namespace": "flowgrpo", "name": "flowgrpo-control-1a2b"},
             {"namespace": "elsewhere", "name": "some/thing-1"}]
    assert holders(names) == "run first (reward.ocr 1, rollout 2); run second (learner 1)"
    assert holders([]) == ""
