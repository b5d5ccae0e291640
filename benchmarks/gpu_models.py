"""Models at their real size with random weights, made on the device itself: no download, no second copy.

Sizes are those of the published component configurations. Text encoders are left out: conditioning is random, of the
right shape. `small` shrinks everything, for a trial on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from flowgrpo_ray.data.trajectory import Arrays, to_wire
from flowgrpo_ray.errors import ConfigError, nearest
from flowgrpo_ray.policies.base import Policy

_VAE: dict[str, Any] = dict(
    in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=(128, 256, 512, 512), layers_per_block=2,
    latent_channels=16, norm_num_groups=32, sample_size=1024, use_quant_conv=False, use_post_quant_conv=False,
    mid_block_add_attention=True)
_SMALL_VAE: dict[str, Any] = dict(
    block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, sample_size=64)


@dataclass(frozen=True)
class Spec:
    """A model without weights. `tokens` = length of the text sequence that the transformer is given."""

    family: str
    config_file: str  # the recipe whose settings the check runs with
    transformer: dict[str, Any]
    vae: dict[str, Any]
    scheduler: dict[str, Any]
    tokens: int
    small_transformer: dict[str, Any]


SPECS: dict[str, Spec] = {
    "sd35-medium": Spec(
        family="sd3", config_file="sd35_medium_ocr_1gpu.yaml",
        transformer=dict(
            sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=24, attention_head_dim=64,
            num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048,
            pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm"),
        vae={**_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609},
        scheduler=dict(num_train_timesteps=1000, shift=3.0),
        tokens=77 + 256,  # CLIP, then T5
        small_transformer=dict(
            num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=64,
            caption_projection_dim=32, pooled_projection_dim=32, sample_size=16, pos_embed_max_size=24,
            dual_attention_layers=(0,)),
    ),
    "flux-dev": Spec(
        family="flux", config_file="flux_fast_ocr.yaml",
        transformer=dict(
            patch_size=1, in_channels=64, num_layers=19, num_single_layers=38, attention_head_dim=128,
            num_attention_heads=24, joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True,
            axes_dims_rope=(16, 56, 56)),
        vae={**_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159},
        scheduler=dict(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
                       base_image_seq_len=256, max_image_seq_len=4096),
        tokens=512,
        small_transformer=dict(
            num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=64,
            pooled_projection_dim=32, axes_dims_rope=(4, 6, 6)),
    ),
}
SMALL_TOKENS = 16


def spec_of(name: str) -> Spec:
    """The spec of a name; ConfigError names the nearest."""
    if name not in SPECS:
        raise ConfigError(f"no model is named {name!r}{nearest(name, SPECS)}")
    return SPECS[name]


def make(
    cls: type, config: dict[str, Any], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> nn.Module:
    """A diffusers model with random weights, created in `dtype` on `device`.

    Matrices and kernels are N(0, 1 / fan-in), gains 1, biases 0: activations keep their size through all layers.
    """
    from accelerate import init_empty_weights

    with init_empty_weights():  # parameters on the meta device; buffers (position tables) are computed as ever
        model = cls(**config)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for name, param in model.named_parameters():
            if param.ndim > 1:
                param.normal_(0.0, 1 / math.sqrt(param[0].numel()), generator=generator)
            else:
                param.fill_(1.0 if name.endswith("weight") else 0.0)
    return model


def build_policy(name: str, *, device: torch.device, dtype: torch.dtype, small: bool = False, seed: int = 0) -> Policy:
    """The policy of a spec: transformer, VAE and scheduler, without text encoders."""
    import diffusers

    from flowgrpo_ray.policies.flux import FluxPolicy
    from flowgrpo_ray.policies.sd3 import SD3Policy

    spec = spec_of(name)
    policy_class = {"sd3": SD3Policy, "flux": FluxPolicy}[spec.family]
    network = {"sd3": diffusers.SD3Transformer2DModel, "flux": diffusers.FluxTransformer2DModel}[spec.family]
    generator = torch.Generator(device).manual_seed(seed)
    transformer = make(network, spec.transformer | (spec.small_transformer if small else {}), device, dtype, generator)
    # As the loader does: a float16 VAE would overflow.
    vae_dtype = torch.float32 if dtype == torch.float16 else dtype
    vae = make(diffusers.AutoencoderKL, spec.vae | (_SMALL_VAE if small else {}), device, vae_dtype, generator)
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    names += ("text_encoder_3", "tokenizer_3") if spec.family == "sd3" else ()
    pipeline = policy_class.pipeline_class(
        transformer=transformer, vae=vae, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**spec.scheduler),
        **dict.fromkeys(names))
    return policy_class(
        pipeline, device=device, dtype=dtype, vae_scale_factor=2 ** (len(vae.config.block_out_channels) - 1),
        max_sequence_length=policy_class.default_sequence_length)


def random_conditioning(policy: Policy, seed: int, *, small: bool = False) -> Arrays:
    """Conditioning of one prompt, in the wire format of `Policy.encode`: standard normal."""
    config = policy.pipeline.transformer.config
    tokens = SMALL_TOKENS if small else next(s.tokens for s in SPECS.values() if s.family == policy.family)
    generator = torch.Generator().manual_seed(seed)
    shapes = {"prompt_embeds": (1, tokens, config.joint_attention_dim), "pooled": (1, config.pooled_projection_dim)}
    return {key: to_wire(torch.randn(shape, generator=generator).to(policy.dtype)) for key, shape in shapes.items()}


def weight_bytes(policy: Policy) -> int:
    """Bytes of the weights and buffers of all networks."""
    modules = [m for m in policy.pipeline.components.values() if isinstance(m, nn.Module)]
    return sum(t.numel() * t.element_size() for m in modules for t in [*m.parameters(), *m.buffers()])


def perturbed(arrays: Arrays, seed: int = 0) -> Arrays:
    """An adapter that does something: every weight with a little noise (B is 0 at first)."""
    rng = np.random.default_rng(seed)
    return {key: value + rng.standard_normal(value.shape, dtype=np.float32) * np.float32(0.01)
            for key, value in arrays.items()}
