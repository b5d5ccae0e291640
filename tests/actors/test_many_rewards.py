"""A training run under several rewards at once: what is optimised, what only watches, and that replicas change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from runs import assert_same_bits, run, small_config

from flowgrpo_ray.run_dir.sample_table import read_samples
from flowgrpo_ray.views.report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REWARDS = {
    "ocr": {"options": {"mode": "recognition", "normalize": "alnum", "width": 80}},
    "jpeg_compressibility": {"weight": 0.5},
    "bright": {"python": "own_rewards:brightness", "weight": 0.5},
    "place": {"python": "own_rewards:rank_in_group", "weight": 0.5},
    "reader": {"type": "ocr", "weight": 0.0, "every_steps": 2, "options": {"mode": "recognition", "normalize": "alnum"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, ray_cluster):
    return tmp_path_factory.mktemp("runs")


def config(folder, name, replicas):
    pools = {reward: {"num_cpus": 0.1, "replicas": replicas} for reward in REWARDS}
    return small_config(folder, name, steps=2, overrides={
        "rewards": REWARDS, "pools.reward": pools, "advantage.combine": "gdpo", "eval.at_end": True})


@pytest.fixture(scope="module")
def finished(folder):
    """The same run with one and with two replicas of every reward."""
    return run(config(folder, "one", 1)), run(config(folder, "two", 2))


def test_three_kinds_under_gdpo_with_replicas(finished):
    one, two = finished
    assert_same_bits(one.adapter, two.adapter)
    first, last = two.rows
    for reward in ("ocr", "ocr_exact", "jpeg_compressibility", "bright", "place"):
        assert np.isfinite(first[f"reward_mean/{reward}"]) and np.isfinite(last[f"reward_mean/{reward}"])
    assert "reward_mean/reader" not in first and "reward_mean/reader" in last, "the monitor is asked in every second step"
    assert last["reward_mean/place"] == pytest.approx(0.5), "places in a group of 4: 0, 1/3, 2/3, 1"
    assert {key for key in last if key.startswith("eval/policy/")} >= {"eval/policy/reader", "eval/policy/bright"}
    assert "eval/policy/place" not in last, "a place in a group says nothing about one image"
    with open(write_report(two.run_dir)) as file:
        page = file.read()
    for reward in REWARDS:
        assert f"Training reward: {reward}" in page


def test_advantages_are_those_of_the_scores(finished):
    """gdpo written out: z-score of each reward in its group, weighted, then normalised over the step."""
    rows = [row for row in read_samples(finished[1].run_dir).to_pylist() if row["step"] == 1]
    total = np.zeros(len(rows))
    groups = np.array([row["group"] for row in rows])
    for reward, weight in (("ocr", 1.0), ("jpeg_compressibility", 0.5), ("bright", 0.5), ("place", 0.5)):
        scores = np.array([row[f"reward:{reward}"] for row in rows])
        for group in set(groups):
            part = scores[groups == group]
            total[groups == group] += weight * (part - part.mean()) / (part.std() + 1e-4)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    assert np.allclose([row["advantage"] for row in rows], expected.clip(-5, 5), atol=1e-6)
