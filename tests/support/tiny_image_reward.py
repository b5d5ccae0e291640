"""A small ImageReward model of the package's own classes, with random weights, in the published layout of files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowgrpo_ray.rewards import image_reward, image_reward_package

MED_CONFIG = {
    "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 64, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64, "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 2,
    "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 40, "encoder_width": 768, "add_cross_attention": True,
}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "plain", "red", "blue", "green", "image", "of", "cat", "dog",
         "##s", "noise", ",", "word")


def small_vit(vit: str, image_size: int, *args: Any) -> tuple[Any, int]:
    """In place of the package's `create_vit`, which knows only base and large: two blocks of width 32."""
    assert (vit, image_size) == ("large", 224)
    classes = sys.modules[f"{image_reward_package.ALIAS}.models.BLIP.vit"]
    return classes.VisionTransformer(img_size=image_size, patch_size=32, embed_dim=32, depth=2, num_heads=2), 32


def package() -> tuple[Any, Any]:
    """The package's modules, as the reward imports them."""
    return image_reward_package.load(lambda image: torch.from_numpy(image_reward.preprocess(image)))


def save(folder: Path) -> dict[str, str]:
    """Write weights, med_config.json and a tokenizer; returns the reward's options. `small_vit` has to be in place."""
    tokenizer = folder / "bert"
    tokenizer.mkdir()
    (tokenizer / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "model_max_length": 64}))
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    torch.manual_seed(0)
    module, parts = package()
    own, parts.init_tokenizer = parts.init_tokenizer, lambda: None
    try:
        model = module.ImageReward(med_config=str(folder / "med_config.json"))
    finally:
        parts.init_tokenizer = own
    with torch.no_grad():  # the package starts its head so near 0 that every image would score the same
        for weight in model.mlp.parameters():
            weight.copy_(torch.randn(weight.shape) / max(weight.shape[-1], 1) ** 0.5)
    torch.save(model.state_dict(), folder / "ImageReward.pt")
    return {"weights": str(folder / "ImageReward.pt"), "tokenizer": str(tokenizer)}


def noise(n: int, height: int = 40, width: int = 56, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), np.uint8)
