"""With no noise a policy is the stock pipeline: same latents in, same images out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from policy_steps import HEIGHT, PROMPTS, WIDTH, conditioning, euler, noise, sampled

NEGATIVES = ["blurry", "words"]
NO_T5 = {"text_encoder_3": None, "tokenizer_3": None}
COMMON = dict(height=HEIGHT, width=WIDTH, num_inference_steps=4, max_sequence_length=12)


def stock_pipeline(folder: str, kind: str, without_t5: bool = False):
    if kind.startswith("flux"):
        pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    else:
        extra = {} if kind == "sd3_t5" and not without_t5 else NO_T5
        pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, **extra)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


SD3_CASES = [
    pytest.param("sd3_t5", 4.5, True, id="t5-cfg"),
    pytest.param("sd3_t5", 4.5, False, id="t5-cfg-without-t5"),
    pytest.param("sd3_t5", 1.0, True, id="t5-guidance-1"),
    pytest.param("sd3_no_t5", 3.0, True, id="no-t5-cfg"),
    pytest.param("sd3_no_t5", 1.0, True, id="no-t5-guidance-1"),
    pytest.param("sd3_dynamic", 2.0, True, id="dynamic-shift-dual-attention"),
]


@pytest.mark.parametrize(("kind", "guidance", "use_t5"), SD3_CASES)
def test_sd3_images_equal_the_stock_pipelines(fresh, folders, kind, guidance, use_t5):
    policy = fresh(kind, use_t5=use_t5)
    x = noise(policy)
    given = conditioning(policy, PROMPTS, NEGATIVES if policy.uses_cfg(guidance) else None)
    ours = policy.decode_float(euler(policy, x, given, guidance), HEIGHT, WIDTH)
    stock = stock_pipeline(folders(kind), kind, without_t5=not use_t5)(
        PROMPTS, negative_prompt=NEGATIVES, guidance_scale=guidance, latents=x, output_type="pt", **COMMON).images
    assert ours.shape == (2, 3, HEIGHT, WIDTH) and ours.dtype == torch.float32
    assert (ours - stock).abs().max() <= 1e-5
    assert stock.std() > 0.01 and (stock[0] - stock[1]).abs().max() > 1e-3  # not a comparison of blanks


def test_each_prompt_and_the_negative_reach_the_sd3_image(shared):
    """The equality above would also hold for a model that ignores its text."""
    policy = shared("sd3_t5")
    x = noise(policy, batch=1)
    images = [euler(policy, x, conditioning(policy, [prompt], [negative]), 4.5)
              for prompt, negative in (("a red cat", "blurry"), ("a red car", "blurry"), ("a red cat", "words"))]
    assert (images[0] - images[1]).abs().max() > 1e-4
    assert (images[0] - images[2]).abs().max() > 1e-4


@pytest.mark.parametrize(("kind", "guidance", "use_t5"), SD3_CASES)
def test_the_samplers_sd3_images_equal_the_stock_pipelines(fresh, folders, kind, guidance, use_t5):
    policy = fresh(kind, use_t5=use_t5)
    x, latents = sampled(policy, guidance, NEGATIVES[0] if policy.uses_cfg(guidance) else None)
    ours = policy.decode_float(latents, HEIGHT, WIDTH)
    pipeline = stock_pipeline(folders(kind), kind, without_t5=not use_t5)

    def stock(negative: str) -> torch.Tensor:
        return pipeline(PROMPTS, negative_prompt=[negative] * 2, guidance_scale=guidance, latents=x, output_type="pt",
                        **COMMON).images

    assert ours.shape == (2, 3, HEIGHT, WIDTH) and (ours - stock(NEGATIVES[0])).abs().max() <= 1e-5
    if guidance > 1:
        assert (ours - stock(NEGATIVES[1])).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "guidance"), [("flux_dev", 3.5), ("flux_dev", 1.0), ("flux_schnell", 0.0)])
def test_the_samplers_flux_images_equal_the_stock_pipelines(shared, folders, kind, guidance):
    policy = shared(kind)
    x, latents = sampled(policy, guidance)
    ours = policy.decode_float(latents, HEIGHT, WIDTH)
    stock = stock_pipeline(folders(kind), kind)(PROMPTS, guidance_scale=guidance, latents=x, output_type="pt", **COMMON).images
    assert ours.shape == (2, 3, HEIGHT, WIDTH) and (ours - stock).abs().max() <= 1e-5


@pytest.mark.parametrize(("kind", "guidance"), [("flux_dev", 3.5), ("flux_dev", 1.0), ("flux_schnell", 0.0)])
def test_flux_images_equal_the_stock_pipelines(shared, folders, kind, guidance):
    policy = shared(kind)
    x = noise(policy)
    ours = policy.decode_float(euler(policy, x, conditioning(policy), guidance), HEIGHT, WIDTH)
    stock = stock_pipeline(folders(kind), kind)(
        PROMPTS, guidance_scale=guidance, latents=x, output_type="pt", **COMMON).images
    assert x.shape == (2, HEIGHT * WIDTH // 64, 64)
    assert (ours - stock).abs().max() <= 1e-5
    assert stock.std() > 0.01 and (stock[0] - stock[1]).abs().max() > 1e-3


def test_guidance_is_an_input_of_flux_dev_and_nothing_to_schnell(shared):
    for kind, matters in (("flux_dev", True), ("flux_schnell", False)):
        policy = shared(kind)
        x, given = noise(policy), conditioning(policy)
        assert not policy.uses_cfg(3.5)
        with torch.no_grad():
            low, high = (policy.velocity(x, 0.6, given, guidance) for guidance in (1.0, 6.0))
        assert torch.equal(low, high) is not matters


def test_the_shipped_model_equals_its_stock_pipeline(fresh):
    from flowgrpo_ray import tiny

    policy = fresh("builtin:tiny", max_sequence_length=1)
    prompts = ['the word "CAT"', 'the word "DOG"']
    x = noise(policy, size=(32, 64))
    ours = policy.decode_float(euler(policy, x, conditioning(policy, prompts, size=(32, 64)), 1.0, 8), 32, 64)
    stock = stock_pipeline(str(tiny.model_dir()), "sd3_no_t5")(
        prompts, guidance_scale=1.0, latents=x, output_type="pt", height=32, width=64, num_inference_steps=8,
        max_sequence_length=1).images
    assert (ours - stock).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["sd3_t5", "flux_dev"])
def test_decoded_pixels_equal_the_stock_pipelines(shared, folders, kind):
    policy = shared(kind)
    x = noise(policy)
    latents = euler(policy, x, conditioning(policy), 1.0)
    stock = stock_pipeline(folders(kind), kind)(PROMPTS, guidance_scale=1.0, latents=x, **COMMON).images
    pixels = policy.decode(latents, HEIGHT, WIDTH)
    assert pixels.dtype == np.uint8 and pixels.shape == (2, HEIGHT, WIDTH, 3) and pixels.flags.c_contiguous
    difference = np.abs(pixels.astype(int) - np.stack([np.asarray(image) for image in stock]).astype(int))
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3  # a last-bit difference may tip a rounding
