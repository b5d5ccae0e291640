"""The learner's updates against the written-out loss, on the tiny model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import formula
import numpy as np
import pytest
import torch
from formula import assert_close
from reference import Bench, configuration, run_update, with_scores

from flowgrpo_ray.data.plan import RankWork
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.policies import lora

KEY = "transformer.transformer_blocks.1.attn.to_v.lora_B.weight"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def mask(group: int, rewards: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sample 1 of group 0, and sample 3 of group 1, without a score."""
    place = 1 if group == 0 else 3
    rewards[place], valid[place] = np.nan, False
    return rewards, valid


CFG = {"sampling": {"guidance_scale": 3.0}, "data": {"negative_prompt": "scribble"}}
CPS = {"sampling": {"kernel": "cps", "noise_level": 0.8, "log_prob": "unscaled"}}
DANCE = {"sampling": {"kernel": "dance_sde", "noise_level": 0.3, "window": {"size": 2, "range": [0, 4]}}}
TOGETHER = {"sampling": {"micro_batch": 4, "batch_groups": 2}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sampling": {"window": {"size": 1, "range": [0, 4]}}},
    "shared_noise": {"sampling": {"shared_initial_noise": True}},
    "cfg": CFG,
    "cps": CPS,
    "dance": DANCE,
    "kl_per_time": {"loss": {"beta": 0.3}},
    "kl_per_step": {"loss": {"beta": 0.3, "kl": "per_step"}},
    "kl_velocity": {"loss": {"beta": 0.3, "kl": "velocity"}},
    "kl_cfg": {"loss": {"beta": 0.3}, **CFG},
    "ratio_norm": {"loss": {"ratio_norm": True}},
    "ratio_norm_kl": {"loss": {"ratio_norm": True, "beta": 0.3}},
    "larger_shards": {"train": {"micro_batch": 4, "ratio_tolerance": 1e-5}},
    "smaller_shards": {"train": {"micro_batch": 1, "ratio_tolerance": 1e-5}},
    "groups_together": TOGETHER,
    "groups_together_kl_cfg": {**CFG, "loss": {"beta": 0.3}, "sampling": {**CFG["sampling"], **TOGETHER["sampling"]}},
    "groups_together_ratio_norm": {"loss": {"ratio_norm": True}, **TOGETHER},
    "larger_shards_of_groups": {"train": {"micro_batch": 4, "batch_groups": 2, "ratio_tolerance": 1e-5}},
    "smaller_shards_of_groups": {**TOGETHER, "train": {"micro_batch": 1, "batch_groups": 1, "ratio_tolerance": 1e-5}},
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_written_formula(bench, case):
    config = configuration(**CASES[case])
    learner, plan, data = bench.start(config)
    data = with_scores(data, mask)
    expected = formula.gradients(config, bench.policy, plan, data, base=bench.base)
    metrics, found = run_update(learner, plan, data)
    assert_close(found, expected)
    assert metrics["first_update_log_ratio_max"] <= (1e-5 if "shards" in case else 0.0)
    assert (metrics["valid_samples"], metrics["masked_samples"]) == (6, 2)
    norm = math.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert (metrics["kl"] > 0) == (config.loss.beta > 0)


@pytest.mark.parametrize("case", ["plain", "ratio_norm", "kl_per_step"])
def test_the_second_update_is_off_policy_and_clipped(bench, case):
    """On the samples of the first, whose ratios have moved to both sides; the clip is set to cut half of each side."""
    config = configuration(**CASES[case], train={"updates_per_step": 2, "learning_rate": 3e-4})
    learner, plan, data = bench.start(config)
    plan = dataclasses.replace(plan, updates=((0, 1), (0, 1)))
    run_update(learner, plan, data)
    ratios: list[float] = []
    formula.gradients(config, bench.policy, plan, data, 1, base=bench.base, ratios=ratios)
    low, high = sorted(1 - r for r in ratios if r < 1), sorted(r - 1 for r in ratios if r > 1)
    assert len(low) > 2 and len(high) > 2
    config.loss.clip_low, config.loss.clip_high = (np.mean(side[len(side) // 2 - 1 :][:2]) for side in (low, high))
    expected = formula.gradients(config, bench.policy, plan, data, 1, base=bench.base)
    metrics, found = run_update(learner, plan, data, 1)
    assert_close(found, expected)
    assert metrics["clip_fraction_low"] == pytest.approx(sum(x > config.loss.clip_low for x in low) / len(ratios))
    assert metrics["clip_fraction_high"] == pytest.approx(sum(x > config.loss.clip_high for x in high) / len(ratios))
    assert metrics["approx_kl"] == pytest.approx(0.5 * np.mean(np.log(ratios) ** 2), rel=1e-3)
    assert np.mean([metrics[f"ratio_mean/{j}"] for j in range(3)]) == pytest.approx(np.mean(ratios), abs=1e-7)
    assert metrics["first_update_log_ratio_max"] == 0
    assert metrics["updates"] == learner.counters["updates"] == 2


def test_a_step_makes_good_samples_likelier_and_bad_ones_less_likely(bench):
    config = configuration()
    gains = []
    for sign in (1, -1):
        learner, plan, data = bench.start(config)
        a = torch.stack([formula.advantages(data, group) for group in (0, 1)])
        run_update(learner, plan, with_scores(data, lambda _, r, v, sign=sign: (sign * r, v)))
        after = formula.log_probs(config, bench.policy, plan, data, 0)
        gain = torch.stack([torch.cat([after[g, s] - torch.from_numpy(data.trajectories[g][s].log_probs.copy())
                                       for s in (0, 1)]).mean(1) for g in (0, 1)])
        gains.append(float((a * gain).sum()))
    assert gains[0] > 1e-5 and gains[1] < -1e-5


def test_negated_scores_give_the_negated_gradient(bench):
    learner, plan, data = bench.start(configuration())
    _, one = run_update(learner, plan, data)
    learner, plan, data = bench.start(configuration())
    _, other = run_update(learner, plan, with_scores(data, lambda _, r, v: (-r, v)))
    assert all(np.array_equal(one[key], -other[key]) for key in one)


def test_a_masked_group_leaves_no_trace(bench):
    """All shards run, and the result is that of an update over the other group alone."""
    learner, plan, data = bench.start(configuration())
    blind = with_scores(data, lambda group, r, v: (r, v & (group == 0)))
    metrics, found = run_update(learner, plan, blind)
    alone = dataclasses.replace(plan, updates=((0,),))
    learner, _, _ = bench.start(configuration())
    expected_metrics, expected = run_update(learner, alone, blind)
    assert all(np.array_equal(found[key], expected[key]) for key in expected)
    assert metrics["masked_samples"] == 4 and expected_metrics["masked_samples"] == 0
    times = {"seconds", "cpu_seconds", "masked_samples"}
    assert {k: v for k, v in metrics.items() if k not in times} == {
        k: v for k, v in expected_metrics.items() if k not in times}


def test_a_shard_of_weight_0_leaves_no_trace(bench):
    learner, plan, data = bench.start(configuration(loss={"beta": 0.3}))
    expected_metrics, expected = run_update(learner, plan, data)
    learner, _, _ = bench.start(configuration(loss={"beta": 0.3}))
    filler = RankWork(plan.train_micro_batches(0)[2], 0.0)
    metrics, found = run_update(learner, plan, data, first=[filler])
    assert all(np.array_equal(found[key], expected[key]) for key in expected)
    times = {"seconds", "cpu_seconds"}
    assert {k: v for k, v in metrics.items() if k not in times} == {
        k: v for k, v in expected_metrics.items() if k not in times}


def test_gradients_do_not_depend_on_activation_checkpointing(bench):
    learner, plan, data = bench.start(configuration(loss={"beta": 0.3}))
    _, expected = run_update(learner, plan, data)
    learner, plan, data = bench.start(configuration(loss={"beta": 0.3}, train={"activation_checkpointing": True}))
    try:
        assert bench.policy.modules["transformer"].is_gradient_checkpointing
        _, found = run_update(learner, plan, data)
    finally:
        bench.policy.modules["transformer"].disable_gradient_checkpointing()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_the_optimizer_step_is_adamw_on_the_clipped_gradient(bench):
    train = {"max_grad_norm": 0.01, "adam_eps": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    learner, plan, data = bench.start(configuration(train=train))
    start = lora.read_state(bench.policy)
    metrics, gradients = run_update(learner, plan, data)
    total = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
    assert metrics["grad_norm"] > 0.02 and total == pytest.approx(0.01, rel=1e-3)
    for key, value in lora.read_state(bench.policy).items():
        g = gradients[key].astype(np.float64)
        expected = start[key] * (1 - 1e-3 * 0.1) - 1e-3 * g / (np.abs(g) + 1e-2)  # the first step's moments, unbiased
        np.testing.assert_allclose(value, expected, rtol=2e-6, atol=1e-9)
    count = sum(g.size for g in gradients.values())
    assert metrics["grad_rms_over_adam_eps"] == pytest.approx(metrics["grad_norm"] / math.sqrt(count) / 1e-2)


def test_an_update_without_signal_is_skipped_and_counted(bench):
    def equal(_, rewards, valid):
        return np.full_like(rewards, -0.5), valid

    learner, plan, data = bench.start(configuration())
    metrics, gradients = run_update(learner, plan, with_scores(data, equal))
    assert not gradients and not learner.optimizer.state
    assert (metrics["idle_updates"], metrics["updates"], metrics["grad_norm"]) == (1, 0, 0.0)
    assert lora.digest(learner.adapter()) == lora.digest(learner.ema_adapter()) == lora.digest(bench.adapter)
    learner, plan, data = bench.start(configuration(loss={"beta": 0.3}))
    metrics, gradients = run_update(learner, plan, with_scores(data, equal))
    assert gradients and (metrics["idle_updates"], metrics["updates"]) == (0, 1)
    learner, plan, data = bench.start(configuration(loss={"beta": 0.3}))
    metrics, gradients = run_update(learner, plan, with_scores(data, lambda _, r, v: (r, v & False)))
    assert not gradients and (metrics["idle_updates"], metrics["valid_samples"]) == (1, 0)


def test_non_finite_gradients_are_skipped_and_counted_and_stop_the_run_at_last(bench):
    learner, plan, data = bench.start(configuration(train={"max_skipped_updates": 1}))
    start = lora.digest(learner.adapter())

    def poisoned() -> dict:
        hook = learner.parameters[KEY].register_hook(lambda grad: grad * math.inf)
        try:
            return run_update(learner, plan, data)[0]
        finally:
            hook.remove()

    metrics = poisoned()
    assert (metrics["skipped_updates"], metrics["updates"]) == (1, 0) and not math.isfinite(metrics["grad_norm"])
    assert lora.digest(learner.adapter()) == lora.digest(learner.ema_adapter()) == start and not learner.optimizer.state
    assert run_update(learner, plan, data)[0]["updates"] == 1  # a good one between: the count begins again
    lora.write_state(bench.policy, bench.adapter)
    assert poisoned()["skipped_updates"] == 2
    with pytest.raises(FlowGrpoError, match="2 updates in a row .* train.max_skipped_updates"):
        poisoned()


def test_ema_follows_the_updates(bench):
    """shadow <- d shadow + (1 - d) theta with d = 1/10, 2/11 after the first two updates."""
    learner, plan, data = bench.start(configuration(train={"updates_per_step": 2}))
    metrics, _ = run_update(learner, plan, data)
    first = learner.adapter()
    assert metrics["ema_decay"] == 0.1
    metrics, _ = run_update(learner, plan, data, 1)
    second, shadow = learner.adapter(), learner.ema_adapter()
    assert metrics["ema_decay"] == 2 / 11
    for key, start in bench.adapter.items():
        expected = 2 / 11 * (0.1 * start + 0.9 * first[key]) + 9 / 11 * second[key]
        np.testing.assert_allclose(shadow[key], expected, rtol=1e-5, atol=1e-8)
    info, adapter, ema = learner.export(1)
    assert (info.digest, info.ema_digest) == (lora.digest(second), lora.digest(shadow))
    assert info.digest != info.ema_digest
    assert (lora.digest(adapter), lora.digest(ema)) == (info.digest, info.ema_digest)


def test_exports_count_the_tensors_that_changed(bench):
    learner, plan, data = bench.start(configuration(train={"weight_decay": 0.0}))
    info, _, _ = learner.export(0)
    assert (info.tensors, info.changed, info.ema_changed, info.norms["adapter_delta_norm"]) == (62, -1, -1, 0.0)
    assert info.digest == lora.digest(bench.adapter)
    run_update(learner, plan, data)
    info, adapter, _ = learner.export(1)
    assert (info.version, info.changed, info.ema_changed) == (1, 60, 60)  # two never get a gradient
    moved = math.sqrt(sum(float(((adapter[key] - start).astype(np.float64) ** 2).sum())
                          for key, start in bench.adapter.items()))
    assert info.norms["adapter_delta_norm"] == pytest.approx(moved, rel=1e-6)
    again, _, _ = learner.export(2)
    assert (again.changed, again.digest) == (0, info.digest)


@pytest.mark.parametrize("advantage", [{"std": "global"}, {"combine": "gdpo"}, {"baseline": "history"}])
def test_advantages_that_need_the_whole_step_wait_for_it(bench, advantage):
    learner, plan, data = bench.start(configuration(advantage=advantage))
    learner.begin_step(plan)
    learner.add_scores({1: data.scores[1]})
    assert learner.step_advantages() == {}
    learner.add_scores({0: data.scores[0]})
    late, history = learner.step_advantages(), learner.state()[1]["history"]
    learner.add_scores({})  # as with every further shard: nothing new
    assert learner.state()[1]["history"] == history
    assert history is None or [count for count, _, _ in history.values()] == [4, 4]
    learner, _, _ = bench.start(configuration(advantage=advantage))
    learner.begin_step(plan)
    learner.add_scores(data.scores)
    assert late.keys() == {0, 1} and all(np.array_equal(late[g], learner.step_advantages()[g]) for g in late)
