"""What every policy promises: frozen weights, shapes, the time input, gradients through both CFG branches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.models import attention_dispatch
from policy_steps import HEIGHT, PROMPTS, WIDTH, conditioning, noise
from torch import nn

from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import from_wire
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.policies.base import Conditioning, decode_batch

KINDS = ["sd3_t5", "sd3_no_t5", "flux_dev"]


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_frozen_and_in_eval_mode(shared, kind):
    networks = [m for m in shared(kind).pipeline.components.values() if isinstance(m, nn.Module)]
    assert len(networks) >= 4
    assert not any(module.training for network in networks for module in network.modules())
    assert not any(param.requires_grad for network in networks for param in network.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_learners_part_gives_the_same_velocity_without_encoders_and_vae(shared, fresh, kind):
    whole, part = shared(kind), fresh(kind, parts="learner")
    names = [name for name, m in part.pipeline.components.items() if isinstance(m, nn.Module)]
    assert names == ["transformer"] and list(part.modules) == ["transformer"]
    given = conditioning(whole, negatives=["", ""])
    x = noise(whole)
    assert part.latent_shape(HEIGHT, WIDTH) == whole.latent_shape(HEIGHT, WIDTH)
    np.testing.assert_array_equal(part.sigmas(5, HEIGHT, WIDTH), whole.sigmas(5, HEIGHT, WIDTH))
    with torch.no_grad():
        assert torch.equal(part.velocity(x, 0.5, given, 3.0), whole.velocity(x, 0.5, given, 3.0))
    with pytest.raises(RuntimeError, match="text encoders"):
        part.encode([PromptRecord("a")])
    with pytest.raises(RuntimeError, match="VAE"):
        part.decode(x, HEIGHT, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoded_prompts_are_wire_arrays_in_the_models_dtype(fresh, kind, dtype):
    policy = fresh(kind, dtype=dtype)
    arrays = policy.encode([PromptRecord(prompt, negative_prompt="ignored here") for prompt in PROMPTS])
    assert set(arrays) == {"prompt_embeds", "pooled"}
    tokens = 12 if kind == "flux_dev" else 16 + 12  # T5's (or the zeros in its place), after CLIP's in SD3
    assert arrays["prompt_embeds"].shape[:2] == (2, tokens) and arrays["pooled"].shape[0] == 2
    for array in arrays.values():
        assert array.dtype == (np.uint16 if dtype == "bfloat16" else np.float32) and array.flags.c_contiguous
        assert from_wire(array).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_encoders_give_the_same_arrays_and_are_put_back(fresh, shared, kind, monkeypatch):
    policy = fresh(kind, offload_encoders=True)
    encoders = [name for name, m in policy.pipeline.components.items()
                if name.startswith("text_encoder") and m is not None]
    assert len(policy._offload_hooks) == len(encoders) and all(
        hasattr(getattr(policy.pipeline, name), "_hf_hook") for name in encoders)
    put_back = []
    for hook in policy._offload_hooks:
        original = hook.offload
        monkeypatch.setattr(hook, "offload", lambda original=original: (put_back.append(1), original()))
    records = [PromptRecord("a red cat"), PromptRecord("blue dog 7"), PromptRecord("")]
    arrays = policy.encode(records)
    assert len(put_back) == len(encoders), "once for all prompts"
    for row, record in enumerate(records):  # each in a forward of its own: the same bits alone and among others
        for name, array in shared(kind).encode([record]).items():
            np.testing.assert_array_equal(arrays[name][row : row + 1], array)


@pytest.mark.parametrize("kind", KINDS)
def test_each_prompt_has_a_forward_of_its_own(fresh, kind, monkeypatch):
    policy, batches = fresh(kind), []
    encode = policy._encode
    monkeypatch.setattr(policy, "_encode", lambda prompts: (batches.append(prompts), encode(prompts))[1])
    policy.encode([PromptRecord(prompt) for prompt in PROMPTS])
    assert batches == [[prompt] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_bases_take_and_return_float32(fresh, kind):
    policy = fresh(kind, dtype="bfloat16")
    given, x = conditioning(policy, negatives=["", ""]), noise(policy)
    with torch.no_grad():
        velocity = policy.velocity(x, 0.5, given, 2.0)
    assert policy.modules["transformer"].dtype == torch.bfloat16
    assert velocity.dtype == torch.float32 and velocity.shape == x.shape and velocity.isfinite().all()
    assert policy.decode_float(x, HEIGHT, WIDTH).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fingerprint_is_that_of_the_weights(fresh, dtype):
    one, other = fresh("sd3_no_t5", dtype=dtype), fresh("sd3_no_t5", dtype=dtype, parts="learner")
    assert one.fingerprint() == other.fingerprint() != fresh("flux_dev", dtype=dtype).fingerprint()
    weight = next(other.modules["transformer"].parameters())
    weight.view(-1)[3] = torch.nextafter(weight.view(-1)[3], torch.tensor(9.0, dtype=weight.dtype))
    assert one.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("parts", ["all", "learner"])
@pytest.mark.parametrize("kind", ["sd3_no_t5", "flux_dev"])
def test_attention_does_not_depend_on_the_environment_of_the_process(fresh, kind, parts, monkeypatch):
    """DIFFUSERS_ATTN_BACKEND sets what an attention layer without a backend of its own uses."""
    registry, other = attention_dispatch._AttentionBackendRegistry, attention_dispatch.AttentionBackendName._NATIVE_MATH
    monkeypatch.setattr(registry, "_active_backend", other)
    transformer = fresh(kind, parts=parts).modules["transformer"]
    assert registry.get_active_backend()[0] == "native"
    pinned = [m.processor._attention_backend for m in transformer.modules()
              if hasattr(getattr(m, "processor", None), "_attention_backend")]
    assert pinned == ["native"] * (3 if kind == "flux_dev" else 0)  # SD3's layers call torch themselves


def test_a_float16_model_decodes_with_a_float32_vae(fresh):
    policy = fresh("sd3_no_t5", dtype="float16")
    assert policy.modules["transformer"].dtype == torch.float16
    assert {param.dtype for param in policy.pipeline.vae.parameters()} == {torch.float32}
    reference = fresh("sd3_no_t5").decode_float(noise(policy), HEIGHT, WIDTH)
    assert (policy.decode_float(noise(policy), HEIGHT, WIDTH) - reference).abs().max() <= 1e-6


@pytest.mark.parametrize(("batch", "sizes"), [(None, [5]), (2, [2, 2, 1]), (9, [5])])
def test_the_vae_decodes_in_micro_batches_of_its_own(shared, batch, sizes, monkeypatch):
    policy, seen = shared("sd3_no_t5"), []
    decode, x = policy.pipeline.vae.decode, noise(policy, 5)
    monkeypatch.setattr(
        policy.pipeline.vae, "decode",
        lambda latents, **more: (seen.append(len(latents)), decode(latents, **more))[1])
    images = policy.decode(x, HEIGHT, WIDTH, batch)
    assert seen == sizes and images.shape == (5, HEIGHT, WIDTH, 3)
    floats = torch.cat(list(policy.decode_parts(x, HEIGHT, WIDTH, batch)))
    rounded = (floats.permute(0, 2, 3, 1).cpu().numpy() * 255).round().astype(np.uint8)
    assert images.tobytes() == rounded.tobytes(), "the bits of rounding in NumPy"


@pytest.mark.parametrize(("size", "images"), [
    ((1024, 1024), 1), ((1536, 1024), 1), ((512, 512), 4), ((256, 256), 16), ((32, 64), 512)])
def test_the_default_decodes_a_bounded_number_of_pixels_at_a_time(size, images):
    assert decode_batch(*size) == images


def test_halves_are_rounded_to_even_on_both_sides(shared, monkeypatch):
    policy = shared("sd3_no_t5")
    halves = (torch.arange(256, dtype=torch.float32) + 0.5) / 255
    values = torch.stack([halves.clamp(max=1), torch.linspace(0, 1, 256), torch.rand(256)])
    monkeypatch.setattr(policy, "decode_float", lambda *_: values[None, :, None])
    rounded = (values.numpy() * 255).round().astype(np.uint8)
    assert policy.decode(torch.zeros(1), 1, 256)[0, 0].T.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_the_transformer_of_a_bfloat16_model_is_given_the_exact_float32_time(fresh, kind, guidance):
    policy = fresh(kind, dtype="bfloat16")
    seen = []
    policy.modules["transformer"].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True)
    given, x = conditioning(policy, negatives=["", ""]), noise(policy)
    sigmas = policy.sigmas(10, HEIGHT, WIDTH)
    with torch.no_grad():
        for sigma in sigmas[:-1]:
            policy.velocity(x, float(sigma), given, guidance)
    expected = sigmas[:-1] * np.float32(1000)
    if kind == "flux_dev":
        expected = expected / np.float32(1000)
    for time, value in zip(seen, expected, strict=True):
        assert time.dtype == torch.float32 and set(time.tolist()) == {float(value)}
    assert any(torch.tensor(value).bfloat16().float() != value for value in expected)  # rounding would have shown


def test_cfg_is_one_batch_of_negative_then_positive(fresh):
    policy = fresh("sd3_t5")
    batches = []
    policy.modules["transformer"].register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(kwargs["pooled_projections"]), with_kwargs=True)
    given, x = conditioning(policy, negatives=["blurry", "words"]), noise(policy)
    with torch.no_grad():
        guided = policy.velocity(x, 0.5, given, 3.0)
        only = [policy.velocity(x, 0.5, Conditioning(rows, None, HEIGHT, WIDTH), 1.0)
                for rows in (given.negative, given.positive)]
    assert [len(batch) for batch in batches] == [4, 2, 2]
    assert torch.equal(batches[0], torch.cat([given.negative["pooled"], given.positive["pooled"]]))
    torch.testing.assert_close(guided, only[0] + 3.0 * (only[1] - only[0]), rtol=0, atol=1e-5)


def test_gradients_flow_whole_through_both_branches_of_cfg(shared):
    policy = shared("sd3_t5")
    given, x = conditioning(policy, negatives=["blurry", "words"]), noise(policy)
    leaves = [rows["pooled"].requires_grad_(True) for rows in (given.negative, given.positive)]
    ours = torch.autograd.grad(policy.velocity(x, 0.5, given, 3.0).square().sum(), leaves)
    negative, positive = (policy.velocity(x, 0.5, Conditioning(rows, None, HEIGHT, WIDTH), 1.0)
                          for rows in (given.negative, given.positive))
    apart = torch.autograd.grad((negative + 3.0 * (positive - negative)).square().sum(), leaves)
    for gradient, expected in zip(ours, apart, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


def test_guidance_without_the_negative_is_an_error_and_below_one_there_is_no_cfg_pass(shared):
    policy = shared("sd3_no_t5")
    given, x = conditioning(policy), noise(policy)
    assert [policy.uses_cfg(g) for g in (0.0, 1.0, 1.01)] == [False, False, True]
    with pytest.raises(ValueError, match="negative"):
        policy.velocity(x, 0.5, given, 3.0)


@pytest.mark.parametrize(("kind", "size", "shape"), [
    ("sd3_t5", (32, 48), (4, 8, 12)), ("sd3_t5", (128, 8), (4, 32, 2)), ("flux_dev", (32, 48), (24, 64))])
def test_latent_shapes(shared, kind, size, shape):
    assert shared(kind).latent_shape(*size) == shape
    assert shared(kind).decode(torch.zeros(1, *shape), *size).shape == (1, *size, 3)


@pytest.mark.parametrize(("kind", "size", "message"), [
    ("sd3_t5", (33, 48), "height is 33 .* multiples of 8 up to 128, and the nearest is 32"),
    ("sd3_t5", (32, 3), "width is 3 .* nearest is 8"),
    ("sd3_t5", (32, 256), "width is 256 .* nearest is 128"),
    ("flux_dev", (30, 48), "height is 30 .* nearest is 32")])
def test_sizes_that_the_model_cannot_make_are_named_with_the_nearest(shared, kind, size, message):
    with pytest.raises(ConfigError, match=message):
        shared(kind).latent_shape(*size)


def test_unset_sequence_length_is_the_familys_own(fresh):
    assert fresh("sd3_no_t5", parts="learner", max_sequence_length=None).max_sequence_length == 256
    assert fresh("flux_dev", parts="learner", max_sequence_length=None).max_sequence_length == 512
