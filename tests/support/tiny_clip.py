"""Small CLIP models with random weights, of the stock transformers classes, saved to disk: what the CLIP rewards are
tested on. `build(folder)` writes model, image processor and tokenizer; the weights depend on the seed alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789\"'.,!?-"
SIZE = 32  # pixels that the vision tower takes
TOKENS = 24  # length of the text tower
WIDTH = 20  # of the embeddings


def build(folder: Path | str, *, seed: int = 0, width: int = WIDTH, size: int = SIZE, act: str = "quick_gelu") -> Path:
    """Write a model, its preprocessor_config.json and its tokenizer into a folder, and return it."""
    folder = Path(folder)
    model(seed=seed, width=width, size=size, act=act).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def model(*, seed: int = 0, width: int = WIDTH, size: int = SIZE, act: str = "quick_gelu") -> CLIPModel:
    """The model; the towers differ in width, as in the large ones."""
    words = tokenizer()
    config = CLIPConfig(
        projection_dim=width, logit_scale_init_value=2.6592,
        text_config={
            "vocab_size": len(words), "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "hidden_act": act,
            "num_attention_heads": 2, "max_position_embeddings": TOKENS, "projection_dim": width,
            "bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id},
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_act": act,
            "image_size": size, "patch_size": 8, "projection_dim": width})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = CLIPModel(config).eval()
        for name, weight in made.named_parameters():
            # The library's own initial scale is so small that all prompts, and all images, would embed to nearly the same.
            if weight.ndim >= 2:
                torch.nn.init.normal_(weight, std=0.5 if "embedding" in name else weight[0].numel() ** -0.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.1)
    return made


def tokenizer(length: int = TOKENS) -> CLIPTokenizer:
    """Letter by letter."""
    pieces = [piece for c in CHARACTERS for piece in (c, f"{c}</w>")] + ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=length)
