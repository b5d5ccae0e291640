"""The result depends on configuration and seed alone; stop + resume equals never stopped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import ordered
import pytest
import ray
from reference import train_reference
from runs import Killer, Script, Watcher, assert_same_bits, run, small_config

from flowgrpo_ray.preflight import check
from flowgrpo_ray.run_dir.metrics import METRICS, deterministic

pytestmark = pytest.mark.usefixtures("ray_cluster")

OCR = {"rewards": {"ocr": {"options": {"mode": "recognition", "normalize": "alnum", "width": 80}}}, "sampling.num_steps": 8,
       "sampling.groups_per_step": 2, "pools.reward": {"ocr": {"num_cpus": 0.1}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def baseline(ray_cluster, folder):
    """Three steps with one rollout and one reward actor, split placement."""
    return run(small_config(folder, "baseline"))


def assert_same_result(a, b):
    assert_same_bits(a.adapter, b.adapter)
    assert_same_bits(a.ema, b.ema)
    assert_same_bits(a.optimizer, b.optimizer)
    assert [deterministic(row) for row in a.rows] == [deterministic(row) for row in b.rows]


def test_baseline_learns_something(baseline):
    # The last block's text queries feed nothing, so one tensor stays where it started.
    still = [key for key, value in baseline.adapter.items() if "lora_B" in key and not np.abs(value).max() > 0]
    assert len(still) == 1 and "add_q_proj" in still[0]
    assert [row["step"] for row in baseline.rows] == [1, 2, 3]
    assert all(row["first_update_log_ratio_max"] == 0.0 for row in baseline.rows)
    assert baseline.rows[-1]["updates"] == 6


def test_one_process_reference_gives_the_same_bits(baseline, folder):
    from flowgrpo_ray.rewards import get

    config = small_config(folder, "reference")
    adapter, ema, _ = train_reference(config, check(config).train, 3, get("jpeg_compressibility"))
    assert_same_bits(baseline.adapter, adapter)
    assert_same_bits(baseline.ema, ema)


def test_the_one_file_example_gives_the_same_bits(baseline, folder):
    import flow_grpo_one_file as example

    from flowgrpo_ray.rewards import get

    config = small_config(folder, "example")
    trainer = example.Trainer(config, {"jpeg_compressibility": get("jpeg_compressibility")})
    for step in range(3):
        trainer.step(check(config).train, step)
    assert_same_bits(baseline.adapter, trainer.adapter())
    assert_same_bits(baseline.ema, trainer.ema_adapter())


def test_three_rollout_and_two_reward_actors(baseline, folder):
    config = small_config(folder, "wide", overrides={
        "pools.rollout.replicas": 3, "pools.reward.jpeg_compressibility.replicas": 2})
    assert_same_result(baseline, run(config))


def test_pools_that_are_scaled_in_mid_step(baseline, folder, tmp_path):
    finished, watcher = scaled(folder, tmp_path, "jpeg_compressibility", {})
    assert_same_result(baseline, finished)
    assert watcher.answers == ["rollout: 1 -> 3 actors; reward.jpeg_compressibility: 1 -> 2 actors",
                               "rollout: 3 -> 1 actor"]
    last = finished.rows[-1]
    assert (last["pool_actors/rollout"], last["pool_actors/reward.jpeg_compressibility"]) == (1, 2)
    assert all(0 < row[f"busy_share/{role}"] <= 1 for row in finished.rows for role in ("rollout", "reward"))
    assert not any(value for key, value in last.items() if key.startswith(("actor_deaths", "actors_taken", "failed_st")))


@pytest.mark.slow
def test_ocr_actors_that_are_scaled_in_mid_step(folder, tmp_path):
    finished, _ = scaled(folder, tmp_path, "ocr", OCR)
    assert_same_result(run(small_config(folder, "ocr-unscaled", overrides=OCR)), finished)


def scaled(folder, tmp_path, reward, overrides):
    """A run whose pools go from 1 to 3 rollout actors in its second step, back to 1 while all 3 sample, and from 1 to 2
    reward actors."""

    def script(watcher):
        watcher.go(0)
        while not watcher.samples(version=1):
            yield
        watcher.scale(rollout=3, **{f"reward__{reward}": 2})
        while watcher.samples(version=1) < 3 or watcher.status(f"reward.{reward}").ready < 2:
            yield
        assert watcher.status("rollout").busy == watcher.status("rollout").target == 3
        watcher.scale(rollout=1)
        assert (watcher.status("rollout").busy, watcher.status("rollout").draining) == (1, 2)
        watcher.go(1)
        while not watcher.samples(version=2):
            yield
        assert watcher.status("rollout") == replace(watcher.status("rollout"), target=1, ready=1, starting=0, draining=0)
        watcher.go(2)

    watcher = Script(script, tmp_path)
    config = small_config(folder, f"scaled-{reward}", overrides={**overrides, "pools.rollout.env": {"EVENTS": str(tmp_path)}})
    finished = run(config, watcher, rollout_class=ordered.Gated)
    assert watcher.samples(version=1) == 3 and watcher.samples(version=2) == 1
    return finished, watcher


def test_colocated(baseline, folder):
    assert_same_result(baseline, run(small_config(folder, "colocated", overrides={"pools.placement": "colocated"})))


def test_killed_actors_change_nothing(baseline, folder):
    killer = Killer()
    config = small_config(folder, "killed", overrides={
        "pools.rollout.replicas": 2, "pools.reward.jpeg_compressibility.replicas": 2})
    finished = run(config, killer)
    assert not killer.left, "the test did not kill what it meant to kill"
    assert finished.rows[-1]["actor_deaths/rollout"] == 1
    assert finished.rows[-1]["actor_deaths/reward.jpeg_compressibility"] == 1
    assert_same_result(baseline, finished)


def test_two_ranks_split_and_colocated_agree(folder):
    split = run(small_config(folder, "ranks-split", steps=2, overrides={"pools.learner.replicas": 2}))
    together = run(small_config(folder, "ranks-colocated", steps=2, overrides={
        "pools.learner.replicas": 2, "pools.placement": "colocated"}))
    assert all(row["first_update_log_ratio_max"] == 0.0 for row in split.rows)
    assert_same_result(split, together)


def test_one_and_two_ocr_actors(folder, tmp_path):
    """Real PaddleOCR: which actor reads a shard, and beside what, changes no score."""
    def config(replicas: int):
        pool = {"num_cpus": 0.1, "replicas": replicas, "env": {"EVENTS": str(tmp_path)}}
        return small_config(folder, f"ocr-{replicas}", steps=2, overrides={**OCR, "pools.reward": {"ocr": pool}})

    one, two = run(config(1)), run(config(2), reward_class=ordered.ScoresBesideAnother)
    assert len(list(tmp_path.glob("scoring-*"))) == 2
    assert_same_result(one, two)
    assert [row["updates"] for row in one.rows] == [2, 4]
    assert all(row["reward_std/ocr"] > 0 and row["masked_samples"] == 0 for row in two.rows)


def test_stop_and_resume_equals_never_stopped(folder):
    overrides = {"eval.every_steps": 2, "checkpoint.every_steps": 2, "advantage.baseline": "history"}
    through = run(small_config(folder, "through", steps=4, overrides=overrides))
    run(small_config(folder, "resumed", steps=2, overrides=overrides))
    watcher = Watcher()
    resumed = run(small_config(folder, "resumed", steps=4, overrides=overrides), watcher)
    assert watcher.said[0] == "resuming from step 2"
    assert [row["step"] for row in watcher.rows] == [3, 4]
    assert "eval/ema/jpeg_compressibility" in resumed.rows[-1]
    assert_same_result(through, resumed)


def test_evaluation_does_not_touch_training(baseline, folder):
    for placement in ("split", "colocated"):
        finished = run(small_config(folder, f"eval-{placement}", overrides={
            "eval.every_steps": 1, "eval.at_start": True, "pools.placement": placement}))
        assert_same_bits(baseline.adapter, finished.adapter)
        raw, ema = (finished.rows[-1][f"eval/{weights}/jpeg_compressibility"] for weights in ("policy", "ema"))
        assert raw != ema


def test_nothing_stays_behind(ray_cluster):
    """The runs of this module have ended: no actor and no placement group is left."""
    import time

    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < 16 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources()["CPU"] == 16


def test_every_metric_of_the_table_is_recorded(folder):
    """What the table of metrics promises is in the rows of a run (on CPU, and where it does not stop)."""
    finished = run(small_config(folder, "metrics", steps=1, overrides={"eval.at_end": True, "loss.beta": 0.01}))
    recorded = {key.split("/")[0] for row in finished.rows for key in row}
    promised = {metric.name for metric in METRICS if metric.recorded}
    assert promised - recorded == {"images_per_gpu_s", "peak_memory", "stopped"}
