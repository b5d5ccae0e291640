"""The sampler: bits that depend on the request alone, and windows that can be evaluated again."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import formula
import numpy as np
import pytest
import reference
import torch
from PIL import Image
from reference import RECORDS, configuration, training_request

from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import initial_seeds, plan_step
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays, SampleRequest, Trajectory, from_wire
from flowgrpo_ray.errors import SyncError
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.slots import AdapterSlots
from flowgrpo_ray.sampling.noise import draw
from flowgrpo_ray.sampling.sampler import Sampler, build_conditioning, step_noise, transition_at

ANY = {"window": {"size": 2, "range": [0, 3]}}
KERNELS: dict[str, dict[str, Any]] = {
    "flow_sde": ANY,
    "cps": {"kernel": "cps", "noise_level": 0.8, **ANY},
    "cps_unscaled": {"kernel": "cps", "noise_level": 0.8, "log_prob": "unscaled", **ANY},
    "dance_sde": {"kernel": "dance_sde", "noise_level": 0.3, "window": {"size": 2, "range": [0, 4]}},
    "cfg": {"guidance_scale": 3.0, **ANY},
    "whole": {},
}
PLACES = [(case, start) for case in KERNELS for start in (0, 1) if (case, start) != ("whole", 1)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    policy, _ = reference.load(configuration())
    lora.write_state(policy, reference.perturbed(policy))
    return policy


@pytest.fixture(scope="module")
def encoded(policy) -> dict[str, Arrays]:
    """Conditioning by prompt; "" is the negative."""
    sampler = Sampler(policy, configuration())
    return {text: sampler.encode(PromptRecord(text)) for text in ["", *(record.prompt for record in RECORDS)]}


def sampler_of(policy: Policy, config: Config, version: int = 0) -> Sampler:
    slots = AdapterSlots(policy)
    slots.adopt("policy", version)
    return Sampler(policy, config, slots)


def first_request(config: Config, group: int = 0, shard: int = 0, **changes: Any) -> tuple[SampleRequest, str]:
    """Request and prompt of a shard of step 0."""
    plan = plan_step(config, RECORDS, 0)
    return training_request(config, plan, plan.micro_batches_of(group)[shard], **changes), plan.groups[group].record.prompt


def window_start(config: Config, start: int) -> dict[str, Any]:
    return {"window": (start, config.window_size)}


def run(policy: Policy, config: Config, encoded: dict[str, Arrays], **where: Any) -> tuple[np.ndarray, Trajectory]:
    request, prompt = first_request(config, **where)
    _, images, trajectory = sampler_of(policy, config).sample(request, encoded[""], encoded[prompt])
    return images, trajectory


def same(one: Trajectory, other: Trajectory) -> bool:
    names = ("latents", "log_probs", "sigmas")
    return all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in names)


# Bits depend on the request alone -------------------------------------------------------------------------------------


def test_two_samplers_give_the_same_bits(policy, encoded):
    """Each with a model of its own, as two actors have."""
    config = configuration(sampling={"guidance_scale": 3.0})
    other, _ = reference.load(config)
    lora.write_state(other, lora.read_state(policy))
    request, prompt = first_request(config, png=(0,))
    meta, images, trajectory = sampler_of(policy, config).sample(request, encoded[""], encoded[prompt])
    second = sampler_of(other, config)
    conditioning, negative = second.encode(PromptRecord(prompt)), second.encode(PromptRecord(""))
    assert all(conditioning[key].tobytes() == encoded[prompt][key].tobytes() for key in conditioning)
    other_meta, other_images, other_trajectory = second.sample(request, negative, conditioning)
    assert np.array_equal(images, other_images) and same(trajectory, other_trajectory)
    assert (meta.version, meta.digest, meta.pngs) == (other_meta.version, other_meta.digest, other_meta.pngs)
    assert trajectory.digest == meta.digest == lora.digest(lora.read_state(policy))
    assert trajectory.request == request and trajectory.window == request.window


def test_shards_do_not_depend_on_what_was_sampled_before(policy, encoded):
    config = configuration()
    places = [(group, shard) for group in (0, 1) for shard in (0, 1)]
    runs = []
    for order in (places, places[::-1]):
        torch.manual_seed(len(runs))
        runs.append({place: run(policy, config, encoded, group=place[0], shard=place[1]) for place in order})
    for place in places:
        assert np.array_equal(runs[0][place][0], runs[1][place][0]) and same(runs[0][place][1], runs[1][place][1])
    latents = [runs[0][place][1].latents[0] for place in places]
    assert not any(np.array_equal(latents[i], latents[j]) for i in range(4) for j in range(i))


def test_noise_belongs_to_the_sample_and_not_to_its_place():
    config = configuration()
    request, _ = first_request(config, shard=0)
    later, _ = first_request(config, shard=1)
    both = replace(request, noise_keys=later.noise_keys[::-1] + request.noise_keys, index=(0,) * 4)
    for step in (-1, 0, 2):
        rows = step_noise(both, step, (4, 3))
        assert torch.equal(rows[2:], step_noise(request, step, (4, 3)))
        assert torch.equal(rows[:2].flip(0), step_noise(later, step, (4, 3)))
        assert torch.equal(rows[2], formula.noise(request.noise_keys[0], step, (4, 3)))
    assert len({float(step_noise(both, step, (1,))[0]) for step in range(-1, 9)}) == 10
    assert not torch.equal(step_noise(replace(both, stream="eval"), 0, (4, 3)), step_noise(both, 0, (4, 3)))


def test_a_shared_start_is_the_groups(policy, encoded):
    """One initial latent for all samples of a group, whichever shard they are in; later noise is each one's own."""
    config = configuration(sampling={"shared_initial_noise": True})
    parts = [run(policy, config, encoded, shard=shard)[1] for shard in (0, 1)]
    start = parts[0].latents[0, 0]
    assert all(np.array_equal(part.latents[0, i], start) for part in parts for i in range(2))
    after = [part.latents[1, i] for part in parts for i in range(2)]
    assert not any(np.array_equal(after[i], after[j]) for i in range(4) for j in range(i))
    assert not np.array_equal(run(policy, config, encoded, group=1)[1].latents[0, 0], start)
    own = run(policy, configuration(), encoded)[1].latents[0]
    assert not np.array_equal(own[0], own[1])


# The window -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "start"), PLACES)
def test_stored_latents_give_the_stored_log_probs_again(policy, encoded, case, start):
    """With gradients on, as the learner does it: to the bit."""
    config = configuration(sampling=KERNELS[case])
    request, prompt = first_request(config, **window_start(config, start))
    sampler = sampler_of(policy, config)
    _, _, trajectory = sampler.sample(request, encoded[""], encoded[prompt])
    latents, w = from_wire(trajectory.latents), config.window_size
    conditioning = build_conditioning(policy, request, encoded[""], [encoded[prompt]])
    assert latents.shape == (w + 1, 2, 4, 8, 16) and trajectory.log_probs.shape == (2, w)
    assert trajectory.sigmas.shape == (5,) and {latents.dtype, from_wire(trajectory.log_probs).dtype} == {torch.float32}
    for j in range(w):
        _, transition = transition_at(policy, sampler.kernel, latents[j], from_wire(trajectory.sigmas), start + j,
                                      conditioning, config.sampling.guidance_scale)
        assert transition.mean.requires_grad
        assert transition.log_prob(latents[j + 1]).detach().numpy().tobytes() == trajectory.log_probs[:, j].tobytes()


@torch.no_grad()
@pytest.mark.parametrize(("case", "start"), PLACES)
def test_sampling_is_the_written_formula_inside_the_window_and_euler_outside(policy, encoded, case, start):
    config = configuration(sampling=KERNELS[case])
    request, prompt = first_request(config, **window_start(config, start))
    _, images, trajectory = sampler_of(policy, config).sample(request, encoded[""], encoded[prompt])
    guidance, w = config.sampling.guidance_scale, config.window_size
    negative = encoded[""] if guidance > 1 else None
    x = torch.stack([formula.noise(key, -1, (4, 8, 16)) for key in request.noise_keys])
    sigmas = trajectory.sigmas.tolist()
    for i in range(4):
        if start <= i <= start + w:
            torch.testing.assert_close(from_wire(trajectory.latents[i - start]), x, rtol=1e-4, atol=1e-4)
            x = from_wire(trajectory.latents[i - start])  # go on from what was stored, so that errors do not pile up
        v = formula.velocity(policy, x, sigmas[i], encoded[prompt], negative, guidance)
        if not start <= i < start + w:
            x = x + v * (sigmas[i + 1] - sigmas[i])
            continue
        mean, std, _ = formula.step(config, x.double(), v.double(), sigmas, i)
        x = (mean + std * torch.stack([formula.noise(key, i, (4, 8, 16)) for key in request.noise_keys])).float()
        found = formula.log_prob(config, from_wire(trajectory.latents[i - start + 1]).double(), mean, std)
        np.testing.assert_allclose(trajectory.log_probs[:, i - start], found, rtol=1e-4, atol=1e-4)
    if start + w == 4:
        x = from_wire(trajectory.latents[-1])
    expected = policy.decode(x, 32, 64)
    assert np.abs(images.astype(int) - expected.astype(int)).max() <= 1  # x is equal to rounding, pixels to a level


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_window_of_size_0_is_the_ode(policy, encoded, guidance):
    config = configuration(sampling={"guidance_scale": guidance})
    request, prompt = first_request(config, window=(0, 0), stream="eval", num_steps=6)
    sampler = sampler_of(policy, config)
    x, trajectory = sampler.denoise(request, "d", encoded[""], encoded[prompt])
    assert trajectory.latents.size == 0 and trajectory.log_probs.shape == (2, 0) and trajectory.nbytes == 7 * 4
    expected, table = step_noise(request, -1, (4, 8, 16)), torch.from_numpy(trajectory.sigmas)
    negative = encoded[""] if guidance > 1 else None
    for i in range(6):
        v = formula.velocity(policy, expected, float(table[i]), encoded[prompt], negative, guidance)
        expected = expected + v * (table[i + 1] - table[i])
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)
    _, images, _ = sampler.sample(request, encoded[""], encoded[prompt])
    assert images.dtype == np.uint8 and images.shape == (2, 32, 64, 3)
    assert np.array_equal(images, policy.decode(x, 32, 64))


def test_the_size_of_a_trajectory(policy, encoded):
    """(w + 1) latents and w log-probs a sample, and one sigma table."""
    _, trajectory = run(policy, configuration(sampling=ANY), encoded)
    assert trajectory.nbytes == 2 * (3 * 4 * 8 * 16 * 4 + 2 * 4) + 5 * 4


# Requests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "version", "message"),
    [("policy", 1, "policy version 1, and this actor holds version 0"), ("ema", 0, "ema version 0, .* holds nothing")])
def test_a_version_that_is_not_held_is_refused(policy, encoded, slot, version, message):
    config = configuration()
    request, prompt = first_request(config, slot=slot, version=version)
    with pytest.raises(SyncError, match=message):
        sampler_of(policy, config).sample(request, None, encoded[prompt])


def test_samples_are_made_with_the_slot_that_is_named(policy, encoded):
    config = configuration()
    arrays = lora.read_state(policy)
    sampler = sampler_of(policy, config)
    sampler.slots.load("ema", 0, {key: value * np.float32(2) for key, value in arrays.items()})
    found = {}
    for slot in ("policy", "ema", "policy"):
        request, prompt = first_request(config, slot=slot, window=(0, 0))
        meta, images, _ = sampler.sample(request, None, encoded[prompt])
        assert np.array_equal(found.setdefault(slot, images), images)
        assert meta.digest == lora.digest(lora.read_state(policy))
    assert lora.digest(lora.read_state(policy)) == lora.digest(arrays)
    assert not np.array_equal(found["policy"], found["ema"])


def test_pngs_are_of_the_positions_that_are_asked_for(policy, encoded):
    config = configuration()
    request, prompt = first_request(config, png=(1, 0))
    meta, images, _ = sampler_of(policy, config).sample(request, None, encoded[prompt])
    opened = [np.asarray(Image.open(io.BytesIO(data))) for data in meta.pngs]
    assert len(opened) == 2 and np.array_equal(opened[0], images[1]) and np.array_equal(opened[1], images[0])
    assert not np.array_equal(images[0], images[1])
    request, _ = first_request(config)
    assert sampler_of(policy, config).sample(request, None, encoded[prompt])[0].pngs == ()


def test_prompts_of_a_mixed_batch_are_gathered_by_index(policy, encoded):
    texts = [RECORDS[i].prompt for i in (0, 1, 2)]
    pair = {key: np.concatenate([encoded[texts[0]][key], encoded[texts[1]][key]]) for key in encoded[""]}
    request, _ = first_request(configuration(), index=(2, 0, 1, 0), guidance_scale=2.0)
    given = build_conditioning(policy, request, encoded[""], [pair, encoded[texts[2]]])
    for key in encoded[""]:
        expected = torch.cat([from_wire(encoded[texts[row]][key]) for row in (2, 0, 1, 0)])
        assert torch.equal(given.positive[key], expected)
        assert torch.equal(given.negative[key], from_wire(encoded[""][key]).expand_as(expected))
    assert (given.height, given.width) == (32, 64)
    plain = replace(request, guidance_scale=1.0)
    assert build_conditioning(policy, plain, None, [pair, encoded[texts[2]]]).negative is None


@torch.no_grad()
def test_each_sample_of_a_mixed_batch_is_of_its_own_prompt(policy, encoded):
    config = configuration()
    texts = [record.prompt for record in RECORDS[:2]]
    request, _ = first_request(config, window=(0, 0), index=(1, 0))
    sampler = sampler_of(policy, config)
    mixed, _ = sampler.denoise(request, "d", None, encoded[texts[0]], encoded[texts[1]])
    for place, text in ((0, texts[1]), (1, texts[0])):
        alone, _ = sampler.denoise(replace(request, index=(0, 0)), "d", None, encoded[text])
        torch.testing.assert_close(mixed[place], alone[place], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(mixed[1 - place], alone[1 - place], atol=1e-2)


def test_guidance_without_its_negative_prompt_is_an_error(policy, encoded):
    config = configuration(sampling={"guidance_scale": 3.0})
    request, prompt = first_request(config)
    with pytest.raises(ValueError, match="needs the encoded negative prompt"):
        sampler_of(policy, config).sample(request, None, encoded[prompt])


def test_the_negative_prompt_matters(policy, encoded):
    config = configuration(sampling={"guidance_scale": 3.0})
    request, prompt = first_request(config, window=(0, 0))
    sampler = sampler_of(policy, config)
    one, _ = sampler.denoise(request, "d", encoded[""], encoded[prompt])
    other, _ = sampler.denoise(request, "d", encoded[RECORDS[4].prompt], encoded[prompt])
    assert not torch.equal(one, other)


def test_one_prompt_is_encoded_at_a_time(policy, encoded):
    for arrays in encoded.values():
        assert {key: value.shape[0] for key, value in arrays.items()} == {"prompt_embeds": 1, "pooled": 1}
        assert all(value.dtype == np.float32 and value.flags["C_CONTIGUOUS"] for value in arrays.values())


def test_sampling_leaves_no_gradient_and_no_graph(policy, encoded):
    config = configuration()
    request, prompt = first_request(config)
    x, _ = sampler_of(policy, config).denoise(request, "d", None, encoded[prompt])
    assert not x.requires_grad and all(p.grad is None for p in lora.parameters(policy).values())


@pytest.mark.parametrize("shared", [False, True])
def test_the_recorded_seeds_are_those_of_the_initial_latents(shared):
    config = configuration(sampling={**ANY, "shared_initial_noise": shared})
    plan = plan_step(config, RECORDS, 3)
    group = plan.groups[1]
    requests = [training_request(config, plan, shard) for shard in plan.micro_batches_of(1)]
    noise = torch.cat([step_noise(request, -1, (4, 2, 2)) for request in requests])
    assert torch.equal(draw(initial_seeds(config, group), (4, 2, 2)), noise)
