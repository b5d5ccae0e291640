"""Adapter files for other loaders: alpha where ComfyUI and kohya's tools look for it, or folded in.

An adapter's effect is (alpha / r) B A. diffusers reads alpha from the metadata in the file's header;
a loader that drops them takes alpha = r, which is a wrong scale. ComfyUI reads `<layer>.alpha` beside
diffusers' key names. kohya's sd-scripts (whose files ComfyUI and, for FLUX, diffusers load too) name
layers as the models' original code does: q, k and v are one layer there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.policies.lora import METADATA_KEY, LoraSettings
from flowgrpo_ray.run_dir.checkpoint import tensors_to_bytes

FORMATS = ("diffusers", "comfyui", "kohya")

# By family and kind of block: each original layer, and the layers of diffusers that it consists of,
# in the order of their rows.
_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_ORIGINAL = {
    ("sd3", "transformer_blocks"): ("joint_blocks", {
        "x_block_attn_qkv": _QKV,
        "x_block_attn_proj": ("attn.to_out.0",),
        "x_block_attn2_qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
        "x_block_attn2_proj": ("attn2.to_out.0",),
        "x_block_mlp_fc1": ("ff.net.0.proj",),
        "x_block_mlp_fc2": ("ff.net.2",),
        "context_block_attn_qkv": _ADDED,
        "context_block_attn_proj": ("attn.to_add_out",),
        "context_block_mlp_fc1": ("ff_context.net.0.proj",),
        "context_block_mlp_fc2": ("ff_context.net.2",)}),
    ("flux", "transformer_blocks"): ("double_blocks", {
        "img_attn_qkv": _QKV,
        "img_attn_proj": ("attn.to_out.0",),
        "img_mlp_0": ("ff.net.0.proj",),
        "img_mlp_2": ("ff.net.2",),
        "txt_attn_qkv": _ADDED,
        "txt_attn_proj": ("attn.to_add_out",),
        "txt_mlp_0": ("ff_context.net.0.proj",),
        "txt_mlp_2": ("ff_context.net.2",)}),
    ("flux", "single_transformer_blocks"): ("single_blocks", {
        "linear1": (*_QKV, "proj_mlp"),
        "linear2": ("proj_out",)}),
}
_LAYER = re.compile(r"transformer\.(?P<kind>\w+)\.(?P<block>\d+)\.(?P<path>.+)")


def encode(
    arrays: Arrays, settings: LoraSettings, format: str, family: str, *, fold_alpha: bool = False,
) -> bytes:
    """A safetensors file of an adapter.

    Args:
        arrays: float32 weights by key (`transformer.<layer>.lora_A.weight`, `.lora_B.weight`).
        format: of `FORMATS`.
        family: of the model, "sd3" or "flux"; kohya's names depend on it.
        fold_alpha: multiply alpha / r into B, so that alpha = r: every loader has the right scale.

    Raises:
        ConfigError: kohya's format has no name for a layer of the adapter.
    """
    if fold_alpha:
        scale = np.float32(settings.alpha / settings.rank)
        arrays = {key: array * scale if key.endswith(".lora_B.weight") else array
                  for key, array in arrays.items()}
        settings = replace(settings, alpha=float(settings.rank))
    if format == "kohya":
        return tensors_to_bytes(_kohya(arrays, settings, family))
    layers = _layers(arrays)
    if format == "comfyui":
        alphas = {f"{layer}.alpha": np.array(settings.alpha, np.float32) for layer in layers}
        return tensors_to_bytes({**arrays, **alphas})
    metadata: dict[str, Any] = {}
    for name in sorted({layer.partition(".")[0] for layer in layers}):
        paths = [layer.partition(".")[2] for layer in layers if layer.startswith(f"{name}.")]
        metadata |= {f"{name}.r": settings.rank, f"{name}.lora_alpha": settings.alpha,
                     f"{name}.lora_dropout": 0.0, f"{name}.bias": "none",
                     f"{name}.target_modules": paths}
    return tensors_to_bytes(arrays, {METADATA_KEY: json.dumps(metadata, sort_keys=True)})


def _layers(arrays: Mapping[str, np.ndarray]) -> list[str]:
    ending = ".lora_A.weight"
    return sorted(key.removesuffix(ending) for key in arrays if key.endswith(ending))


def _kohya(arrays: Arrays, settings: LoraSettings, family: str) -> Arrays:
    """The adapter as `lora_unet_<layer>.lora_down.weight`, `.lora_up.weight` and `.alpha`.

    A layer that consists of n of ours gets rank n r and alpha n alpha (the same scale): their A one
    below the other, their B along the diagonal; those without an adapter are zeros.
    """
    out: dict[str, np.ndarray] = {}
    done: set[str] = set()
    for layer in _layers(arrays):
        if layer in done:
            continue
        match = _LAYER.fullmatch(layer)
        kind, names = _ORIGINAL.get((family, match["kind"]), (None, {})) if match else (None, {})
        found = [(name, parts) for name, parts in names.items() if match and match["path"] in parts]
        if match is None or not found:
            raise ConfigError(f"--format kohya has no name for the layer {layer} of this adapter; "
                              "use --format diffusers or comfyui")
        (name, parts), block = found[0], f"transformer.{match['kind']}.{match['block']}"
        down, up = _stacked(arrays, [f"{block}.{part}" for part in parts])
        done |= {f"{block}.{part}" for part in parts}
        key = f"lora_unet_{kind}_{match['block']}_{name}"
        out |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up,
                f"{key}.alpha": np.array(settings.alpha * len(parts), np.float32)}
    return out


def _stacked(arrays: Arrays, layers: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """A [n r, in] and B [sum of rows, n r] of one layer that stands for n."""
    present = {layer: (arrays[f"{layer}.lora_A.weight"], arrays[f"{layer}.lora_B.weight"])
               for layer in layers if f"{layer}.lora_A.weight" in arrays}
    rank, width = next(iter(present.values()))[0].shape
    downs, blocks = [], []
    for i, layer in enumerate(layers):
        # What is absent: q, k and v are as wide as their input, FLUX's MLP is 4 times as wide.
        height = width * (4 if layer.endswith("proj_mlp") else 1)
        zeros = np.zeros((rank, width), np.float32), np.zeros((height, rank), np.float32)
        a, b = present.get(layer, zeros)
        downs.append(a)
        blocks.append(np.pad(b, ((0, 0), (i * rank, (len(layers) - 1 - i) * rank))))
    return np.concatenate(downs), np.concatenate(blocks)
