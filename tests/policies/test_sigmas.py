"""Sigma tables against the scheduler state that the stock pipelines leave behind, and against published numbers."""

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.policies.sigmas import sigma_table


def scheduler(**options):
    return FlowMatchEulerDiscreteScheduler(**options)


@pytest.fixture(scope="module")
def sd3():
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=8, out_channels=4,
        pos_embed_max_size=32)
    return StableDiffusion3Pipeline(
        transformer=transformer, scheduler=scheduler(), vae=None, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None)


@pytest.fixture(scope="module")
def flux():
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4))
    return FluxPipeline(
        transformer=transformer, scheduler=scheduler(), vae=None, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None)


def run(pipeline, steps, height, width):
    """The stock pipeline's own call, down to latents; returns what its scheduler then holds."""
    pipeline.set_progress_bar_config(disable=True)
    pipeline(
        prompt_embeds=torch.zeros(1, 3, 16), pooled_prompt_embeds=torch.zeros(1, 8), guidance_scale=1.0,
        num_inference_steps=steps, height=height, width=width, output_type="latent",
        generator=torch.Generator().manual_seed(0))
    return pipeline.scheduler.sigmas.numpy()


@pytest.mark.parametrize("steps", [4, 10, 40])
def test_sd3_with_a_fixed_shift(sd3, steps):
    sd3.scheduler = scheduler(shift=3.0)
    table = sigma_table(sd3.scheduler, steps)
    np.testing.assert_array_equal(table, run(sd3, steps, 64, 128))
    assert table.dtype == np.float32 and table.shape == (steps + 1,)
    assert table[0] == 1 and table[-1] == 0 and (np.diff(table) < 0).all()


@pytest.mark.parametrize("size", [(64, 64), (128, 256)])
def test_sd3_with_a_shift_by_resolution(sd3, size):
    height, width = size
    sd3.scheduler = scheduler(use_dynamic_shifting=True, base_image_seq_len=16, max_image_seq_len=256)
    tokens = (height // 8 // 2) * (width // 8 // 2)
    np.testing.assert_array_equal(sigma_table(sd3.scheduler, 10, image_seq_len=tokens), run(sd3, 10, height, width))


@pytest.mark.parametrize("size", [(64, 64), (128, 256)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_flux(flux, size, dynamic):
    height, width = size
    flux.scheduler = scheduler(use_dynamic_shifting=dynamic, shift=1.0 if not dynamic else 3.0)
    tokens = (height // 16) * (width // 16)
    table = sigma_table(flux.scheduler, 6, image_seq_len=tokens, sigmas="linear")
    np.testing.assert_array_equal(table, run(flux, 6, height, width))


def test_numbers_of_the_published_recipes():
    sd3 = sigma_table(scheduler(shift=3.0), 10)
    np.testing.assert_allclose(
        sd3, [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0], atol=6e-5)
    flux = sigma_table(scheduler(use_dynamic_shifting=True, shift=3.0), 6, image_seq_len=1024, sigmas="linear")
    np.testing.assert_allclose(flux, [1, 0.9037, 0.7897, 0.6525, 0.4842, 0.2730, 0], atol=6e-5)


def test_explicit_sigmas_are_shifted_like_the_pipelines_do():
    table = sigma_table(scheduler(shift=2.0), 3, sigmas=[1.0, 0.5, 0.25])
    np.testing.assert_allclose(table, [1.0, 2 / 3, 0.4, 0.0], rtol=1e-6)


def test_the_schedulers_own_state_stays():
    own = scheduler(shift=3.0)
    own.set_timesteps(7)
    before = own.sigmas.clone()
    first = sigma_table(own, 10)
    assert torch.equal(own.sigmas, before) and own.num_inference_steps == 7
    np.testing.assert_array_equal(sigma_table(own, 10), first)


def test_a_shift_set_on_the_live_scheduler_counts():
    moved = scheduler(shift=1.0)
    moved.set_shift(3.0)
    expected = scheduler(shift=1.0)
    expected.set_shift(3.0)
    expected.set_timesteps(10)
    np.testing.assert_array_equal(sigma_table(moved, 10), expected.sigmas.numpy())


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        (DDIMScheduler(), {}, "FlowMatchEulerDiscreteScheduler"),
        (scheduler(stochastic_sampling=True), {}, "stochastic_sampling"),
        (scheduler(invert_sigmas=True), {}, "invert_sigmas"),
        (scheduler(use_dynamic_shifting=True), {}, "image_seq_len"),
        (scheduler(), {"sigmas": [1.0, 0.5]}, "2 sigmas for 4 steps"),
        (scheduler(), {"sigmas": "lin"}, "did you mean 'linear'"),
        (scheduler(), {"num_steps": 0}, "use 1 or more"),
    ])
def test_schedulers_that_do_not_fit_are_refused(own, options, message):
    with pytest.raises(ConfigError, match=message):
        sigma_table(own, **{"num_steps": 4, **options})
