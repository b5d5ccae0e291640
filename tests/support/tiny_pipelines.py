"""Small pipelines with random weights, of the stock diffusers classes, saved to disk: what the policies are tested on.

`build(kind, folder)` writes one and returns the folder; KINDS lists them. The weights depend on the kind alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789\"'.,!?-"
WIDTH = 32  # of both text encoders and of the tokens
CLIP_TOKENS = 16
PIXELS = 4  # per latent cell: the VAE has three resolutions

KINDS = ("sd3_t5", "sd3_no_t5", "sd3_dynamic", "flux_dev", "flux_schnell")


def build(kind: str, folder: Path | str) -> Path:
    """Write the pipeline of a kind into a folder and return it.

    sd3_t5: three text encoders, shift 3. sd3_no_t5: without T5. sd3_dynamic: the shift depends on the resolution, one
    block has SD3.5's second attention. flux_dev: guidance embeddings, dynamic shift. flux_schnell: neither.
    """
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(KINDS.index(kind))
        pipeline = _sd3(kind) if kind.startswith("sd3") else _flux(kind)
        for name, module in pipeline.components.items():
            if name.startswith("text_encoder") and module is not None:
                # The libraries' own initial scale is so small that every prompt would encode to nearly the same.
                for path, weight in module.named_parameters():
                    if "embedding" in path or path == "shared.weight":
                        torch.nn.init.normal_(weight, std=0.7)
        pipeline.save_pretrained(folder)
    return folder


def _sd3(kind: str) -> StableDiffusion3Pipeline:
    with_t5, dynamic = kind == "sd3_t5", kind == "sd3_dynamic"
    transformer = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=2 * WIDTH, caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH, pos_embed_max_size=16, qk_norm="rms_norm",
        dual_attention_layers=(0,) if dynamic else (),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic)
    return StableDiffusion3Pipeline(
        transformer=transformer, scheduler=scheduler, vae=_vae(4),
        text_encoder=_clip(CLIPTextModelWithProjection), tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(CLIPTextModelWithProjection), tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(2 * WIDTH) if with_t5 else None, tokenizer_3=_t5_tokenizer() if with_t5 else None,
    )


def _flux(kind: str) -> FluxPipeline:
    dev = kind == "flux_dev"
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, guidance_embeds=dev, axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0 if dev else 1.0, use_dynamic_shifting=dev)
    return FluxPipeline(
        transformer=transformer, scheduler=scheduler, vae=_vae(16),
        text_encoder=_clip(CLIPTextModel), tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(WIDTH), tokenizer_2=_t5_tokenizer(),
    )


def _vae(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=[4, 8, 8],
        down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3,
        latent_channels=channels, norm_num_groups=2, layers_per_block=1, mid_block_add_attention=False,
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5, shift_factor=0.06,
    )


def _clip(model: type) -> CLIPTextModel | CLIPTextModelWithProjection:
    tokenizer = _clip_tokenizer()
    return model(CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=2 * WIDTH, projection_dim=WIDTH,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )).eval()


def _clip_tokenizer() -> CLIPTokenizer:
    pieces = [piece for c in CHARACTERS for piece in (c, f"{c}</w>")] + ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=CLIP_TOKENS)


def _t5(width: int) -> T5EncoderModel:
    return T5EncoderModel(T5Config(
        vocab_size=len(_t5_tokenizer()), d_model=width, d_kv=8, d_ff=2 * width, num_layers=1, num_heads=2,
    )).eval()


def _t5_tokenizer() -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in CHARACTERS)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0)
