"""The untrained tiny pipeline: stock diffusers and transformers classes, a character tokenizer, no T5."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

MAX_TOKENS = 18
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789\"'.,!?-:;()&"
_TEXT_WIDTH = 64
_MERGES_HEADER = "#version: 0.2\n"


def vocabulary() -> dict[str, int]:
    """Token ids of a CLIP tokenizer that has no merges: each character, inside and at the end of a word."""
    tokens = [token for c in _CHARACTERS for token in (c, c + "</w>")] + ["<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}


def tokenizer() -> CLIPTokenizer:
    """A fresh tokenizer (its first use would store padding settings in what it saves)."""
    return CLIPTokenizer(vocab=vocabulary(), merges=[], model_max_length=MAX_TOKENS)


def autoencoder() -> AutoencoderKL:
    """RGB at 1/4 size in 4 channels; a word of 32x64 px is a latent of 4x8x16. 165 thousand parameters."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 32), layers_per_block=1, norm_num_groups=4, latent_channels=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False,
        scaling_factor=1.0, shift_factor=0.0)


def text_encoder() -> CLIPTextModelWithProjection:
    ids = vocabulary()
    end = ids["<|endoftext|>"]
    encoder = CLIPTextModelWithProjection(CLIPTextConfig(
        vocab_size=len(ids), hidden_size=_TEXT_WIDTH, intermediate_size=2 * _TEXT_WIDTH, projection_dim=_TEXT_WIDTH,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=MAX_TOKENS,
        bos_token_id=ids["<|startoftext|>"], eos_token_id=end, pad_token_id=end))
    # SD3 reads the last hidden state but one, which no norm has scaled: at CLIP's 0.02 the letters would be invisible.
    for name, parameter in encoder.named_parameters():
        if "embedding" in name:
            torch.nn.init.normal_(parameter, std=0.7)
    return encoder


def transformer() -> SD3Transformer2DModel:
    """Four blocks, 128 wide, 2.3 million parameters."""
    return SD3Transformer2DModel(
        sample_size=24, patch_size=2, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=64,
        num_attention_heads=2, joint_attention_dim=2 * _TEXT_WIDTH, caption_projection_dim=128,
        pooled_projection_dim=2 * _TEXT_WIDTH, pos_embed_max_size=24, qk_norm="rms_norm")


def pipeline(vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    """A pipeline around a VAE, the other weights drawn from torch's global generator."""
    return StableDiffusion3Pipeline(
        transformer=transformer(), scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), vae=vae,
        text_encoder=text_encoder(), tokenizer=tokenizer(), text_encoder_2=text_encoder(), tokenizer_2=tokenizer(),
        text_encoder_3=None, tokenizer_3=None)


def save(pipe: StableDiffusion3Pipeline, folder: Path, dtype: torch.dtype) -> None:
    """Write a pipeline folder in `dtype`, to which the pipeline itself is converted."""
    pipe.tokenizer, pipe.tokenizer_2 = tokenizer(), tokenizer()
    pipe.to(dtype).save_pretrained(folder)
    for name in ("tokenizer", "tokenizer_2"):  # transformers 5 writes tokenizer.json alone; older readers want these
        (folder / name / "vocab.json").write_text(json.dumps(vocabulary()))
        (folder / name / "merges.txt").write_text(_MERGES_HEADER)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors leaves them readable for their owner alone
    for file in folder.rglob("*.json"):  # where a component was loaded from is nobody's business
        tree = json.loads(file.read_text())
        if tree.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(tree, indent=2) + "\n")


def load(folder: Path) -> StableDiffusion3Pipeline:
    """Load a saved pipeline in fp32; diffusers must be told that there is no T5."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        folder, text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe
