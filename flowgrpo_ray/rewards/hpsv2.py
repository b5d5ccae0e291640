"""hpsv2: Human Preference Score v2 (arXiv 2306.09341), from its published checkpoint, which has open_clip's layout."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from flowgrpo_ray.rewards.base import Option
from flowgrpo_ray.rewards.clip_models import (
    LOCAL_OPTIONS,
    PIXEL_MEAN,
    PIXEL_STD,
    VIT_H,
    Clip,
    check_texts,
    import_transformers,
    load_state_dict,
    load_tokens,
    local_file,
    refuse_keys,
    unreachable,
)
from flowgrpo_ray.rewards.clip_scores import TextAlignment

_MEAN, _STD = (np.array(values, np.float32)[:, None, None] for values in (PIXEL_MEAN, PIXEL_STD))

_STRAIGHT = str.maketrans("‘’“”", "''\"\"")

_ViT_H_14 = {
    "projection_dim": 1024,
    "text_config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "projection_dim": 1024, "hidden_act": "gelu", "vocab_size": 49408, "max_position_embeddings": 77,
        "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 49407,
    },
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "projection_dim": 1024, "hidden_act": "gelu", "image_size": 224, "patch_size": 14,
    },
}

# transformers' name -> open_clip's; in this order.
_RENAMES = (
    (r"^text_model\.embeddings\.token_embedding\.weight$", "token_embedding.weight"),
    (r"^text_model\.embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^text_model\.final_layer_norm\.", "ln_final."),
    (r"^text_model\.encoder\.layers\.", "transformer.resblocks."),
    (r"^text_projection\.weight$", "text_projection"),
    (r"^vision_model\.embeddings\.class_embedding$", "visual.class_embedding"),
    (r"^vision_model\.embeddings\.patch_embedding\.weight$", "visual.conv1.weight"),
    (r"^vision_model\.embeddings\.position_embedding\.weight$", "visual.positional_embedding"),
    (r"^vision_model\.pre_layrnorm\.", "visual.ln_pre."),
    (r"^vision_model\.post_layernorm\.", "visual.ln_post."),
    (r"^vision_model\.encoder\.layers\.", "visual.transformer.resblocks."),
    (r"^visual_projection\.weight$", "visual.proj"),
    (r"\.layer_norm([12])\.", r".ln_\1."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    (r"\.self_attn\.out_proj\.", ".attn.out_proj."),
    (r"\.self_attn\.[qkv]_proj\.(weight|bias)$", r".attn.in_proj_\1"),
)


class HpsV2(TextAlignment):
    """Cosine between the embeddings of image and prompt, by a CLIP ViT-H/14 that was trained on people's choices: what the
    hpsv2 package calls the score, without the logit scale. Good images score about 0.25 to 0.35.

    As in that package, the *longest* side of an image is resized to 224 pixels and the rest filled with black (so nothing
    is cut off), HTML entities in a prompt are resolved, curly quotes are made straight, and a prompt is cut at 77 tokens;
    its repairs of broken Unicode (ftfy) are not made.
    """

    name: ClassVar[str] = "hpsv2"
    range: tuple[float, float] = (-1.0, 1.0)
    licence: ClassVar[str] = "Apache-2.0 (HPSv2)"
    description: ClassVar[str] = "People's preference for an image of the prompt (HPS v2.1): cosine"
    options: ClassVar[dict[str, Option]] = {
        "checkpoint": Option("xswu/HPSv2/HPS_v2.1_compressed.pt",
                             "HPS_v2_compressed.pt, HPS_v2.1_compressed.pt or alike: a file, or OWNER/REPO/FILE on the hub",
                             path=True),
        "processor": Option(VIT_H, "Folder or hub name of the tokenizer", path=True, weights=False),
        "config": Option(None, "Folder or hub name of a CLIP config.json, where the checkpoint is no ViT-H/14",
                         path=True, weights=False),
        "revision": Option(None, "Hub revision of `checkpoint` (branch, tag or commit)"),
        **LOCAL_OPTIONS,
    }

    @property
    def factor(self) -> float:
        """See `TextAlignment.factor`."""
        return 1.0

    def _load(self) -> Clip:
        s = self.settings
        config = _architecture(s["config"])
        tokens = load_tokens(self.name, "processor", s["processor"], None, config)
        path = local_file(self.name, "checkpoint", s["checkpoint"], s["revision"])
        model = from_open_clip(load_state_dict(self.name, "checkpoint", path), config, s["checkpoint"])
        clip = Clip(model, _fitted(config.vision_config.image_size), lambda prompt: tokens(_cleaned(prompt)),
                    dtype=s["dtype"], batch_size=s["batch_size"])
        check_texts(self.name, "processor", s["processor"], clip)
        return clip


def _architecture(source: str | None) -> Any:
    """transformers' CLIPConfig."""
    transformers = import_transformers("hpsv2")
    if source is None:
        return transformers.CLIPConfig(**_ViT_H_14)
    try:
        return transformers.CLIPConfig.from_pretrained(source)
    except Exception as error:
        raise unreachable("hpsv2", "config", source, "a CLIP config.json", error) from error


def from_open_clip(weights: Mapping[str, Any], config: Any, source: str) -> Any:
    """transformers' CLIPModel, float32 on the CPU, of a state dict with open_clip's names (arXiv 2212.07143).

    There the weights of queries, keys and values are stacked in one matrix, and projections are applied from the right, so
    they are transposed here.

    Raises:
        RewardError: keys are missing, unexpected or of another shape than `config` has; they are named.
    """
    import torch
    from transformers import CLIPModel

    with torch.device("meta"):
        wanted = {key: tuple(value.shape) for key, value in CLIPModel(config).state_dict().items()}
    names = {key: _open_clip_name(key) for key in wanted}
    needed = set(names.values())
    refuse_keys("hpsv2", "checkpoint", source, needed - weights.keys(), weights.keys() - needed)

    converted, shapes = {}, []
    for key, name in names.items():
        value = weights[name].float()
        if part := re.search(r"\.([qkv])_proj\.", key):
            value = value.chunk(3)["qkv".index(part[1])] if len(value) % 3 == 0 else value
        elif key in ("text_projection.weight", "visual_projection.weight"):
            value = value.T
        converted[key] = value.contiguous()
        if tuple(value.shape) != wanted[key]:
            shapes.append(f"{name} {list(weights[name].shape)}, where {key} is {list(wanted[key])}")
    refuse_keys("hpsv2", "checkpoint", source, (), (), shapes)
    model = CLIPModel.from_pretrained(None, config=config, state_dict=converted, dtype=torch.float32)
    return model


def _open_clip_name(key: str) -> str:
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def _fitted(size: int) -> Callable[[np.ndarray], np.ndarray]:
    """uint8 [H, W, 3] -> float32 [3, size, size]: the longest side resized (bicubic, antialiased, not clipped), black
    around, normalised."""

    def preprocess(image: np.ndarray) -> np.ndarray:
        import torch

        pixels = torch.from_numpy(np.array(image.transpose(2, 0, 1), np.float32) / 255)
        if max(image.shape[:2]) != size:
            scale = size / max(image.shape[:2])
            height, width = (max(round(side * scale), 1) for side in image.shape[:2])
            pixels = torch.nn.functional.interpolate(
                pixels[None], (height, width), mode="bicubic", align_corners=False, antialias=True)[0]
        left, top = (size - pixels.shape[2]) // 2, (size - pixels.shape[1]) // 2
        framed = np.zeros((3, size, size), np.float32)
        framed[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels.numpy()
        return (framed - _MEAN) / _STD

    return preprocess


def _cleaned(prompt: str) -> str:
    return html.unescape(html.unescape(prompt.translate(_STRAIGHT))).strip()
