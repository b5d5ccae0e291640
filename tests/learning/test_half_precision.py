"""Gradients through half-precision models at the geometry of real latents, where float16 underflows without a scale.

The models have the shapes of SD3 (16 channels, 64 x 64 cells at 512 px), few and narrow layers, and random weights.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from reference import RECORDS, Bench, run_update

from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import StepPlan, plan_step
from flowgrpo_ray.data.trajectory import GroupScores, Trajectory, to_wire
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.learning.loss_scale import GROWTH_UPDATES, LARGEST, LossScale
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.sd3 import SD3Policy
from flowgrpo_ray.sampling.sampler import build_conditioning, kernel_of, step_noise, transition_at

WIDTH = 64  # of the prompt's tokens
KEY = "transformer.transformer_blocks.1.attn.to_v.lora_B.weight"


def configuration(dtype: str, size: int, step: int, guidance: float) -> Config:
    """One group of two samples, trained at one denoising step of ten."""
    return reference.configuration(
        model={"dtype": dtype}, loss={"clip_low": 1e-4},
        sampling={"height": size, "width": size, "num_steps": 10, "group_size": 2, "groups_per_step": 1,
                  "micro_batch": 2, "guidance_scale": guidance, "window": {"size": 1, "range": [step, step + 1]}},
        # ratios of exactly 1 in every dtype, so that only the backward pass differs
        train={"on_ratio_mismatch": "recompute"})


def sd3(config: Config) -> Policy:
    """Two blocks of 128 channels, with an adapter that does something."""
    dtype = getattr(torch, config.model.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = SD3Transformer2DModel(
            sample_size=64, patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=64,
            num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=128,
            pooled_projection_dim=WIDTH, pos_embed_max_size=96, qk_norm="rms_norm").to(dtype)
    pipeline = SimpleNamespace(transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=None,
                               components={"transformer": transformer})
    policy = SD3Policy(pipeline, device=torch.device("cpu"), dtype=dtype, vae_scale_factor=8, max_sequence_length=77)
    lora.attach(policy, config.lora, 0)
    lora.write_state(policy, reference.perturbed(policy))
    return policy


def embedded(seed: int) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    return {"prompt_embeds": torch.randn(1, 77, WIDTH, generator=generator).numpy(),
            "pooled": torch.randn(1, WIDTH, generator=generator).numpy()}


@torch.no_grad()
def sampled(config: Config, plan: StepPlan, policy: Policy) -> reference.StepData:
    """The window's one transition, from noised random data: the steps before it would add nothing but time."""
    group = plan.groups[0]
    request = reference.training_request(config, plan, plan.shards[0])
    shape, index = policy.latent_shape(group.height, group.width), group.window[0]
    table = policy.sigmas(10, group.height, group.width)
    negative = embedded(1) if config.sampling.guidance_scale > 1 else None
    data = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2))
    x = (1 - float(table[index])) * data + float(table[index]) * step_noise(request, -1, shape)
    _, transition = transition_at(
        policy, kernel_of(config), x, torch.from_numpy(table), index,
        build_conditioning(policy, request, negative, [embedded(0)]), config.sampling.guidance_scale)
    following = transition.sample(step_noise(request, index, shape))
    trajectory = Trajectory(
        latents=to_wire(torch.stack([x, following])), log_probs=to_wire(transition.log_prob(following)[:, None]),
        sigmas=table, window=group.window, request=request, digest="")
    scores = GroupScores({reference.JPEG: np.array([0.0, 1.0], np.float32)}, np.ones(2, dtype=bool))
    return reference.StepData({0: embedded(0)}, {0: negative}, {0: [trajectory]}, {0: scores})


def cosines(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Cosine of each weight's gradient with the float32 one; without those that never get a gradient."""
    out = {}
    for key, value in expected.items():
        a, b = value.astype(np.float64).ravel(), found[key].astype(np.float64).ravel()
        if a.any():
            out[key] = float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300))
    return out


def gradients(dtype: str, size: int, step: int, guidance: float, data: Any = None, scale: float | None = None) -> tuple:
    """(gradients that the optimizer gets, the samples) of one update in that dtype; sampled there if not given."""
    config = configuration(dtype, size, step, guidance)
    policy, plan = sd3(config), plan_step(config, RECORDS, 0)
    data = data or sampled(config, plan, policy)
    learner = Learner(policy, config, run_id=reference.RUN_ID)
    if scale is not None:
        learner.loss_scale.value = scale
    metrics, found = run_update(learner, plan, data)
    assert metrics["loss_scale"] == (scale or (4 * size**2 / 4 if dtype == "float16" else 1.0))
    assert metrics["updates"] == 1 and metrics["approx_kl"] == 0.0
    return found, data


@pytest.mark.parametrize(
    ("size", "step", "guidance"),
    [(512, 0, 4.5), (512, 0, 1.0), (512, 7, 4.5),
     *(pytest.param(1024, *case, marks=pytest.mark.slow) for case in ((0, 4.5), (0, 1.0), (7, 4.5)))])
def test_gradients_in_half_precision_are_those_of_float32(size, step, guidance):
    """Per weight. Without the scale most of what enters a float16 model is 0, and the same comparison fails."""
    expected, data = gradients("float32", size, step, guidance)
    scaled = cosines(gradients("float16", size, step, guidance, data)[0], expected)
    plain = cosines(gradients("float16", size, step, guidance, data, scale=1.0)[0], expected)
    brain = cosines(gradients("bfloat16", size, step, guidance, data)[0], expected)
    assert len(scaled) >= 28
    assert min(scaled.values()) > 0.95, scaled
    assert min(brain.values()) > 0.7 and np.mean(list(brain.values())) > 0.98, brain
    assert min(plain.values()) < 0.5 and np.mean(list(plain.values())) < 0.9, plain


# The scale itself -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def float16_learner(bench: Bench) -> tuple:
    """A learner that scales its loss, over a float32 model: what it computes otherwise is exact."""
    learner, plan, data = bench.start(reference.configuration())
    learner.loss_scale = LossScale(torch.float16, math.prod(bench.policy.latent_shape(32, 64)))
    return learner, plan, data


def test_the_scale_is_undone_exactly(bench):
    learner, plan, data = bench.start(reference.configuration())
    plain, expected = run_update(learner, plan, data)
    learner, plan, data = float16_learner(bench)
    scaled, found = run_update(learner, plan, data)
    assert (plain["loss_scale"], scaled["loss_scale"]) == (1.0, learner.loss_scale.value)
    assert learner.loss_scale.value > 1e3
    assert plain["grad_norm"] == scaled["grad_norm"]
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_an_overflow_halves_the_scale_and_is_counted(bench):
    learner, plan, data = float16_learner(bench)
    start = learner.loss_scale.value
    hook = learner.parameters[KEY].register_hook(lambda grad: grad * math.inf)
    metrics, _ = run_update(learner, plan, data)
    hook.remove()
    assert (metrics["skipped_updates"], metrics["updates"], metrics["loss_scale"]) == (1, 0, start)
    metrics, _ = run_update(learner, plan, data)
    assert (metrics["skipped_updates"], metrics["updates"], metrics["loss_scale"]) == (1, 1, start / 2)


def test_the_scale_grows_after_many_good_updates_and_is_bounded():
    scale = LossScale(torch.float16, 65_536)
    assert scale.value == 2**18
    seen = []
    for _ in range(12 * GROWTH_UPDATES):
        scale.update(True)
        seen.append(scale.value)
    assert seen[GROWTH_UPDATES - 2 : GROWTH_UPDATES] == [2**18, 2**19] and seen[-1] == LARGEST
    for _ in range(40):
        scale.update(False)
    assert scale.value == 1.0
    for _ in range(GROWTH_UPDATES - 1):
        scale.update(True)
    scale.update(False)  # the count of good updates begins again
    for _ in range(GROWTH_UPDATES - 1):
        scale.update(True)
    assert scale.value == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exponents_of_float32_need_no_scale(dtype):
    scale = LossScale(dtype, 65_536)
    for finite in (*[True] * 2 * GROWTH_UPDATES, False):
        scale.update(finite)
        assert scale.value == 1.0


def test_the_scale_is_part_of_the_state(bench):
    learner, plan, data = float16_learner(bench)
    for finite in (False, False, True, True):
        learner.loss_scale.update(finite)
    tensors, counters = learner.state()
    assert counters["loss_scale"] == {"value": learner.loss_scale.value, "good_updates": 2}
    other, _, _ = float16_learner(bench)
    initial = other.loss_scale.value
    other.load_state(tensors, {key: value for key, value in counters.items() if key != "loss_scale"})
    assert other.loss_scale.value == initial == 4 * learner.loss_scale.value  # a checkpoint from before there was one
    other.load_state(tensors, counters)
    assert other.state()[1] == counters
