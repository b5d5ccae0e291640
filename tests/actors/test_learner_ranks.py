"""Runs with two learner ranks: sharded, with a bfloat16 base, stopped and resumed, in both placements."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import Finished, Watcher, assert_same_bits, run, small_config

from flowgrpo_ray.run_dir.metrics import deterministic

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

TWO = {"pools.learner.replicas": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


# Sharding -------------------------------------------------------------------------------------------------------------

SHARDINGS = {
    "none": {"train.sharding": "none"},
    "full": {"train.sharding": "full"},
    "none_bfloat16": {"train.sharding": "none", "model.dtype": "bfloat16"},
    "alone_bfloat16": {"model.dtype": "bfloat16", "pools.learner.replicas": 1},
}


@pytest.fixture(scope="module")
def sharded(ray_cluster, folder) -> dict[str, Finished]:
    """One step of one update: later ones would follow other weights."""
    return {name: run(small_config(folder, name, steps=1, overrides={**TWO, **own, "train.updates_per_step": 1}))
            for name, own in SHARDINGS.items()}


@pytest.mark.parametrize("name", SHARDINGS)
def test_the_first_update_is_on_policy_and_the_adapter_is_whole(sharded, name):
    row, adapter = sharded[name].rows[0], sharded[name].adapter
    assert row["first_update_log_ratio_max"] <= (5e-4 if "bfloat16" in name else 0.0)
    assert row["updates"] == 1 and row["valid_samples"] == 16
    assert len(adapter) == 62 and all(value.dtype == np.float32 and np.isfinite(value).all() for value in adapter.values())
    still = [key for key, value in adapter.items() if "lora_B" in key and not value.any()]
    assert len(still) == 1 and "add_q_proj" in still[0], "all train but the last block's text queries, which feed nothing"
    assert {key: value.shape for key, value in adapter.items()} == {
        key: value.shape for key, value in sharded["none"].adapter.items()}


@pytest.mark.parametrize(("name", "like"), [("full", "none"), ("none_bfloat16", "alone_bfloat16")])
def test_the_update_is_the_same_however_it_is_spread(sharded, name, like):
    """To rounding: the shards' gradients are added in another order, and Adam divides them by their own size."""
    found, expected = sharded[name], sharded[like]
    for key, value in expected.adapter.items():
        if "lora_B" in key:  # starts at 0
            assert np.linalg.norm(found.adapter[key] - value) <= 1e-3 * np.linalg.norm(value), key
    for key in ("grad_norm", "policy_loss", "reward_mean/jpeg_compressibility"):
        assert found.rows[0][key] == pytest.approx(expected.rows[0][key], rel=1e-5, abs=1e-9), key


def test_a_bfloat16_base_is_used_by_sampler_and_learner(sharded):
    images = [sharded[name].rows[0]["reward_mean/jpeg_compressibility"] for name in ("none", "none_bfloat16")]
    assert images[0] != images[1] and images[0] == pytest.approx(images[1], rel=0.05)
    assert sharded["none_bfloat16"].rows[0]["grad_norm"] == pytest.approx(sharded["none"].rows[0]["grad_norm"], rel=1.0)


# Stop and resume ------------------------------------------------------------------------------------------------------

OVERRIDES = {**TWO, "eval.every_steps": 2, "checkpoint.every_steps": 2, "advantage.baseline": "history"}


@pytest.fixture(scope="module")
def through(ray_cluster, folder) -> Finished:
    return run(small_config(folder, "through", steps=4, overrides=OVERRIDES))


@pytest.fixture(scope="module")
def half(ray_cluster, folder):
    """half(placement): the folder of a run of two steps."""
    made: dict[str, Path] = {}

    def stopped(placement: str) -> Path:
        if placement not in made:
            config = small_config(folder, f"half-{placement}", steps=2, overrides={**OVERRIDES, "pools.placement": placement})
            made[placement] = Path(run(config).run_dir)
        return made[placement]

    return stopped


@pytest.mark.parametrize(("before", "after"), [("split", "split"), ("colocated", "colocated"), ("split", "colocated")])
def test_two_ranks_resume_as_if_never_stopped(through, half, tmp_path, before, after):
    """In either placement, and from one to the other."""
    name = half(before).name
    shutil.copytree(half(before), tmp_path / name)
    watcher = Watcher()
    resumed = run(small_config(tmp_path, name, steps=4, overrides={**OVERRIDES, "pools.placement": after}), watcher)
    assert watcher.said[0] == "resuming from step 2" and [row["step"] for row in watcher.rows] == [3, 4]
    for part in ("adapter", "ema", "optimizer"):
        assert_same_bits(getattr(through, part), getattr(resumed, part))
    assert [deterministic(row) for row in through.rows] == [deterministic(row) for row in resumed.rows]
