"""What is said of a machine that has too few cores for the actors."""

from __future__ import annotations

import pytest

from actors.placement import crowding
from flowgrpo_ray.config import load


@pytest.mark.parametrize(("overrides", "cores", "crowded"), [
    ([], 2, False),  # the demo as it is: three actors
    ([], 1, True),
    (["pools.learner.replicas=4"], 2, True),
    (["pools.learner.replicas=4"], 4, False),
    (["pools.reward.ocr.replicas=10", "pools.reward.ocr.num_cpus=0.1"], 2, False),  # actors that mostly wait
])
def test_many_more_actors_than_cores_are_warned_of(overrides, cores, crowded):
    assert (crowding(load("configs/tiny_ocr.yaml", overrides), cores) is not None) == crowded


def test_the_numbers_are_in_the_warning():
    config = load(None, ["rewards.ocr.weight=1", "pools.rollout.replicas=4", "pools.reward.ocr.replicas=3"])
    text = crowding(config, 2)
    assert "8 actors (learner 1, reward.ocr 3, rollout 4) ask for 8 CPUs, and this machine has 2" in text
