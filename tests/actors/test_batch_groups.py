"""Micro-batches that span groups: what the plan joins is sampled, scored and trained the same, whoever does it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from own_rewards import brightness
from reference import train_reference
from runs import Killer, assert_same_bits, run, small_config
from scoring_bench import Bench, config_of, random_images

from actors.scoring import ShardScores
from actors.step import StepBoard
from flowgrpo_ray.data.plan import plan_step
from flowgrpo_ray.preflight import check
from flowgrpo_ray.rewards import get
from flowgrpo_ray.run_dir.metrics import deterministic

PROMPTS = [{"prompt": f'the word "{word}"'} for word in ("CAT", "OWL", "FOX", "BEE", "ANT", "COW", "EMU")]
PROMPTS[2]["negative_prompt"] = "a scribble"
PROMPTS[5]["width"] = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def configuration(folder, name, steps=3, **overrides):
    """Eight groups a step in two updates, with CFG, two sizes and two negative prompts."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(line) for line in PROMPTS))
    return small_config(folder, name, steps=steps, overrides={
        "data.train_prompts": str(prompts), "data.eval_prompts": None, "sampling.groups_per_step": 8, "sampling.micro_batch": 4,
        "sampling.batch_groups": 2, "sampling.guidance_scale": 3.0, **overrides})


def one_process(config, steps):
    return train_reference(config, check(config).train, steps, get("jpeg_compressibility"))


@pytest.fixture(scope="module")
def baseline(ray_cluster, folder):
    return run(configuration(folder, "baseline"))


def test_one_process_gives_the_same_bits(baseline, folder):
    config = configuration(folder, "reference")
    plan = plan_step(config, check(config).train, 0)
    assert {len(shard.groups) for shard in plan.shards} == {1, 2} and plan.shards == plan.training
    adapter, ema, _ = one_process(config, 3)
    assert_same_bits(baseline.adapter, adapter)
    assert_same_bits(baseline.ema, ema)
    assert all(row["first_update_log_ratio_max"] == 0.0 and row["valid_samples"] == 32 for row in baseline.rows)


def test_more_actors_deaths_and_a_stop_change_nothing(baseline, folder):
    wide = {"pools.rollout.replicas": 2, "pools.reward.jpeg_compressibility.replicas": 2}
    killer = Killer()
    run(configuration(folder, "killed", steps=1))
    resumed = run(configuration(folder, "killed", **wide), killer)
    assert not killer.left, "the test did not kill what it meant to kill"
    assert_same_bits(baseline.adapter, resumed.adapter)
    assert_same_bits(baseline.optimizer, resumed.optimizer)
    counts = {"actor_deaths/rollout", "actor_deaths/reward.jpeg_compressibility"}
    for one, other in zip(baseline.rows, resumed.rows, strict=True):
        one, other = deterministic(one), deterministic(other)
        assert {k: v for k, v in one.items() if k not in counts} == {k: v for k, v in other.items() if k not in counts}


def test_two_ranks_are_on_policy_too(baseline, folder):
    finished = run(configuration(folder, "ranks", steps=1, **{
        "pools.learner.replicas": 2, "pools.placement": "colocated"}))
    row, one = finished.rows[0], baseline.rows[0]
    assert row["first_update_log_ratio_max"] == 0.0 and row["updates"] == 2
    same = [key for key in one if key.startswith("reward_") or key == "valid_samples"]
    assert {key: row[key] for key in same} == {key: one[key] for key in same}
    assert row["policy_loss"] == pytest.approx(one["policy_loss"], rel=1e-3)


def test_sampling_may_join_more_groups_than_training(ray_cluster, folder):
    config = configuration(folder, "across", steps=2, **{
        "sampling.batch_groups": 6, "train.batch_groups": 1, "train.ratio_tolerance": 1e-4})
    plan = plan_step(config, check(config).train, 0)
    assert any({0, 4} <= {group // 4 * 4 for group in shard.groups} for shard in plan.shards), "none spans two updates"
    finished = run(config)
    assert_same_bits(finished.adapter, one_process(config, 2)[0])
    assert 0 < finished.rows[0]["first_update_log_ratio_max"] < 1e-4


# Scores of a batch ----------------------------------------------------------------------------------------------------


def test_scores_of_a_batch_are_dealt_to_its_groups(folder):
    """A dropped row takes its own group with it, and no other of its batch."""
    config = configuration(folder, "board")
    board = StepBoard(config, plan_step(config, check(config).train, 0), 1)
    for shard in board.plan.shards:
        values = np.array([10.0 * group + sample for group, sample in shard.rows])
        lost = np.array([row == (shard.groups[-1], 1) for row in shard.rows])
        board.scored(shard, ShardScores({"r": np.where(lost, np.nan, values)}, ~lost, lost))
    last = [shard.groups[-1] for shard in board.plan.shards]
    assert board.complete.keys() == set(range(8)) and board.dropped_groups == len(last)
    for group, scores in board.complete.items():
        assert scores.valid.any() != (group in last)
        values = np.delete(scores.rewards["r"], 1 if group in last else [])
        assert values.tolist() == [10.0 * group + sample for sample in range(4) if group not in last or sample != 1]


def test_rewards_of_images_get_a_batch_and_those_of_groups_get_each_group_alone(ray_cluster):
    rewards = {"place": {"python": "own_rewards:rank_in_group"}, "words": {"python": "own_rewards:length"},
               "faulty": {"python": "own_rewards:faulty"},
               "faulty_group": {"python": "own_rewards:faulty_group", "on_failure": "drop_group", "max_failure_rate": 1.0}}
    images, records = random_images(8, 3, victim=6), ["a", "bb"]
    with Bench(config_of(rewards)) as bench:
        bench.submit(images, groups=[(0, 1), (1, 1)], prompts=[text for text in records for _ in range(4)])
        [result] = bench.finish(1)
        calls = dict(bench.scoring.calls)
    assert result.scores["words"].tolist() == [1.0] * 4 + [2.0] * 4
    ranks = [np.argsort(np.argsort(brightness(part, None, None))) / 3 for part in np.split(images, 2)]
    assert np.array_equal(result.scores["place"], np.concatenate(ranks))
    assert np.flatnonzero(np.isnan(result.scores["faulty"])).tolist() == [6]
    assert np.isnan(result.scores["faulty_group"]).tolist() == [False] * 4 + [True] * 4
    assert result.dropped.tolist() == [False] * 4 + [True] * 4 and result.valid.tolist() == [True] * 4 + [False] * 4
    assert calls["words"] == 1 and calls["place"] == 2
