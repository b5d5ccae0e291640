"""The on-policy check, the recomputed log-probs, and the trajectories that a learner refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import formula
import numpy as np
import pytest
import reference
import torch
from formula import assert_close
from reference import Bench, configuration, run_update

from flowgrpo_ray.data.trajectory import from_wire
from flowgrpo_ray.errors import FlowGrpoError, RatioError
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.slots import AdapterSlots

B = "transformer.transformer_blocks.0.attn.to_v.lora_B.weight"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def shifted(bench: Bench, amount: float) -> dict[str, np.ndarray]:
    return {key: value + np.float32(amount if key == B else 0.0) for key, value in bench.adapter.items()}


@pytest.mark.parametrize(
    "sections",
    [{}, {"sampling": {"guidance_scale": 3.0}}, {"sampling": {"kernel": "cps", "log_prob": "unscaled"}},
     {"sampling": {"micro_batch": 1}}, {"sampling": {"window": {"size": 2, "range": [1, 4]}}}],
    ids=["flow", "cfg", "cps", "single", "window"])
def test_the_first_update_is_exactly_on_policy_on_cpu(bench, sections):
    learner, plan, data = bench.start(configuration(**sections))
    assert learner.ratio_tolerance == 0.0
    metrics, _ = run_update(learner, plan, data)
    assert metrics["first_update_log_ratio_max"] == metrics["approx_kl"] == metrics["clip_fraction"] == 0.0
    w = learner.config.window_size
    assert [metrics[f"ratio_mean/{j}"] for j in range(w)] == [1.0] * w
    assert [metrics[f"ratio_std/{j}"] for j in range(w)] == [0.0] * w


def test_other_weights_than_the_samplers_are_noticed(bench):
    learner, plan, data = bench.start(configuration())
    lora.write_state(bench.policy, shifted(bench, 1e-3))
    before = lora.digest(learner.adapter())
    with pytest.raises(RatioError, match=r"above the tolerance 0; .*train.on_ratio_mismatch: recompute"):
        run_update(learner, plan, data)
    assert lora.digest(learner.adapter()) == before and learner.counters["updates"] == 0
    assert not learner.optimizer.state


def test_another_prompt_than_the_samplers_is_noticed(bench):
    learner, plan, data = bench.start(configuration())
    swapped = replace(data, conditionings={0: data.conditionings[1], 1: data.conditionings[0]})
    with pytest.raises(RatioError):
        run_update(learner, plan, swapped)


def test_a_masked_sample_counts_for_the_check(bench):
    """It does not train, but it shows as well as the others that the two sides compute different policies."""
    learner, plan, data = bench.start(configuration())
    part = data.trajectories[1][1]
    log_probs = part.log_probs.copy()
    log_probs[1, 2] = np.nextafter(log_probs[1, 2], np.float32(0))
    parts = [data.trajectories[1][0], replace(part, log_probs=log_probs)]
    odd = replace(data, trajectories={**data.trajectories, 1: parts})
    scores = reference.with_scores(odd, lambda group, r, v: (r, v & (np.arange(4) != 3)))
    with pytest.raises(RatioError):
        run_update(learner, plan, scores)


@pytest.mark.parametrize("ratio_norm", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_log_prob_that_is_no_number_is_noticed_at_any_tolerance(bench, value, ratio_norm):
    learner, plan, data = bench.start(configuration(train={"ratio_tolerance": 1e6}, loss={"ratio_norm": ratio_norm}))
    log_probs = data.trajectories[0][0].log_probs.copy()
    log_probs[0, 0] = value
    odd = [replace(data.trajectories[0][0], log_probs=log_probs), data.trajectories[0][1]]
    with pytest.raises(RatioError, match="inf"):
        run_update(learner, plan, replace(data, trajectories={**data.trajectories, 0: odd}))


def test_a_tolerance_lets_small_differences_pass(bench):
    learner, plan, data = bench.start(configuration(train={"ratio_tolerance": 0.5}))
    lora.write_state(bench.policy, shifted(bench, 1e-3))
    expected = formula.gradients(learner.config, bench.policy, plan, data)
    metrics, found = run_update(learner, plan, data)
    assert 0 < metrics["first_update_log_ratio_max"] < 0.5
    assert_close(found, expected)


@pytest.mark.parametrize("mode", ["stop", "recompute"])
def test_with_ratio_norm_the_check_measures_the_ratio_of_the_loss(bench, mode):
    """mean(eps (mean_new - mean_old)), against which the clip range is set, and not the difference of log-probs."""
    config = configuration(train={"ratio_tolerance": 0.5, "on_ratio_mismatch": mode}, loss={"ratio_norm": True})
    learner, plan, data = bench.start(config)
    lora.write_state(bench.policy, shifted(bench, 1e-3))
    ratios: list[float] = []
    formula.gradients(config, bench.policy, plan, data, base=bench.base, ratios=ratios)
    largest = max(abs(np.log(ratio)) for ratio in ratios)
    plain, _, _ = bench.start(configuration(train={"ratio_tolerance": 0.5}))
    lora.write_state(bench.policy, shifted(bench, 1e-3))
    log_probs = run_update(plain, plan, data)[0]["first_update_log_ratio_max"]
    lora.write_state(bench.policy, shifted(bench, 1e-3))
    found = run_update(learner, plan, data)[0]["first_update_log_ratio_max"]
    assert found == pytest.approx(largest, rel=1e-3)
    assert abs(found - log_probs) > 0.2 * found


def test_with_ratio_norm_other_weights_are_noticed_exactly_on_cpu(bench):
    learner, plan, data = bench.start(configuration(loss={"ratio_norm": True}))
    assert learner.ratio_tolerance == 0.0
    assert run_update(learner, plan, data)[0]["first_update_log_ratio_max"] == 0.0
    learner, plan, data = bench.start(configuration(loss={"ratio_norm": True}))
    lora.write_state(bench.policy, shifted(bench, 1e-5))
    with pytest.raises(RatioError):
        run_update(learner, plan, data)


def test_only_the_first_update_of_a_step_is_checked(bench):
    learner, plan, data = bench.start(configuration(train={"updates_per_step": 2}))
    run_update(learner, plan, data)
    metrics, _ = run_update(learner, plan, data, 1)
    assert metrics["approx_kl"] > 0 and metrics["first_update_log_ratio_max"] == 0.0
    with pytest.raises(RatioError):
        run_update(learner, plan, data)  # the first update of a step again, and the weights have moved


def test_the_automatic_tolerance_of_half_precision_is_a_quarter_of_the_clip():
    config = configuration(model={"dtype": "bfloat16"}, loss={"clip_low": 4e-4})
    policy, _ = reference.load(config)
    slots = AdapterSlots(policy)
    slots.load("policy", 0, reference.perturbed(policy))
    learner = Learner(policy, config, run_id=reference.RUN_ID)
    assert learner.ratio_tolerance == pytest.approx(1e-4)
    assert all(p.dtype == torch.float32 for p in learner.parameters.values())
    plan = reference.plan_step(config, reference.RECORDS, 0)
    sampler = reference.Sampler(policy, config, slots)
    data = reference.sample_step(config, plan, sampler, {reference.JPEG: reference.get(reference.JPEG)})
    metrics, gradients = run_update(learner, plan, data)
    assert metrics["first_update_log_ratio_max"] <= 1e-4 and metrics["grad_norm"] > 0
    assert sum(g.any() for g in gradients.values()) == 60


# Recomputed log-probs -------------------------------------------------------------------------------------------------


def recompute_all(learner: Learner, plan: Any, data: reference.StepData) -> None:
    for work in reference.rank_work(plan, 1):
        learner.recompute(work, *data.arguments(plan, work))


@pytest.mark.parametrize("ratio_norm", [False, True])
def test_recomputed_log_probs_take_the_place_of_the_samplers(bench, ratio_norm):
    """Both updates are measured against the learner's own policy at the start of the step."""
    config = configuration(train={"on_ratio_mismatch": "recompute", "updates_per_step": 2, "learning_rate": 3e-3},
                           loss={"ratio_norm": ratio_norm})
    plain = configuration(train={"updates_per_step": 2})
    learner, plan, data = bench.start(config)
    lora.write_state(bench.policy, shifted(bench, 1e-2))
    own = [formula.log_probs(config, bench.policy, plan, data, update) for update in (0, 1)]
    expected = formula.gradients(plain, bench.policy, plan, data, old=own[0])
    learner.begin_step(plan)
    learner.add_scores(data.scores)
    recompute_all(learner, plan, data)
    learner.begin_step = learner.add_scores = lambda _: None
    metrics, found = run_update(learner, plan, data)
    assert metrics["first_update_log_ratio_max"] > 1e-5  # measured and reported all the same
    assert [metrics[f"ratio_mean/{j}"] for j in range(3)] == [1.0] * 3 and metrics["approx_kl"] == 0.0
    if not ratio_norm:
        assert_close(found, expected)
        expected = formula.gradients(plain, bench.policy, plan, data, 1, old=own[1])
    metrics, found = run_update(learner, plan, data, 1)
    assert metrics["approx_kl"] > 0
    if not ratio_norm:
        assert_close(found, expected)


def test_recomputing_what_agrees_changes_nothing(bench):
    """RatioNorm too: the noise that it makes again is then the one that was drawn, to rounding."""
    for ratio_norm in (False, True):
        both = []
        for mode in ("stop", "recompute"):
            config = configuration(train={"on_ratio_mismatch": mode, "updates_per_step": 2, "learning_rate": 3e-3},
                                   loss={"ratio_norm": ratio_norm, "clip_low": 0.5, "clip_high": 0.5})
            learner, plan, data = bench.start(config)
            gradients: list[dict[str, np.ndarray]] = []
            learner.optimizer.register_step_pre_hook(lambda *_, g=gradients, p=learner.parameters: g.append(
                {key: value.grad.numpy().copy() for key, value in p.items()}))
            reference.learn_step(learner, plan, data)
            both.append(gradients)
        for one, other in zip(*both, strict=True):
            assert_close(one, other)


# Refused trajectories -------------------------------------------------------------------------------------------------


def altered(data: reference.StepData, **changes: Any) -> reference.StepData:
    """Group 0's trajectories with another request or digest."""
    parts = [replace(part, digest=changes["digest"]) if "digest" in changes
             else replace(part, request=replace(part.request, **changes)) for part in data.trajectories[0]]
    return replace(data, trajectories={**data.trajectories, 0: parts})


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"run_id": "other"}, "'other'.* offered to step .*'reference'"), ({"version": 1}, "1.* offered to step .*0"),
     ({"slot": "ema"}, "'ema'"), ({"digest": "0" * 64}, "adapter 000000000000, .*version 0 is")])
def test_foreign_trajectories_are_refused(bench, changes, message):
    learner, plan, data = bench.start(configuration())
    learner.export(0)
    with pytest.raises(FlowGrpoError, match=message):
        run_update(learner, plan, altered(data, **changes))
    learner, plan, data = bench.start(configuration())
    learner.export(0)
    assert run_update(learner, plan, data)[0]["updates"] == 1


def test_trajectories_of_another_group_or_window_are_refused(bench):
    learner, plan, data = bench.start(configuration())
    swapped = replace(data, trajectories={0: data.trajectories[1], 1: data.trajectories[0]})
    with pytest.raises(FlowGrpoError, match=r"\[\(0, 1\)\] .* offered to \[\(0, 0\)\]"):
        run_update(learner, plan, swapped)
    cut = [replace(part, window=(1, 2), latents=part.latents[1:]) for part in data.trajectories[0]]
    with pytest.raises(FlowGrpoError, match=r"window \(1, 2\) offered to .* window \(0, 3\)"):
        run_update(learner, plan, replace(data, trajectories={**data.trajectories, 0: cut}))


def test_guidance_without_its_negative_prompt_is_refused(bench):
    learner, plan, data = bench.start(configuration(sampling={"guidance_scale": 3.0}))
    with pytest.raises(ValueError, match="needs the encoded negative prompt"):
        run_update(learner, plan, replace(data, negatives={0: None, 1: None}))


def test_read_only_arrays_are_taken(bench):
    """As they come out of an object store."""
    learner, plan, data = bench.start(configuration())
    for parts in data.trajectories.values():
        for part in parts:
            part.latents.setflags(write=False)
    assert from_wire(data.trajectories[0][0].latents).is_contiguous()
    assert run_update(learner, plan, data)[0]["updates"] == 1
