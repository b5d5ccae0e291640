"""Small models with random weights on disk for every reward that has one: `options(kind, folder)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_clip
import tiny_image_reward
import tiny_yolos
import torch

from flowgrpo_ray.rewards import hpsv2

DETECTED = {0: "cat", 1: "dog"}


def build(folder: Path) -> dict[str, dict[str, Any]]:
    """Write all models below a folder; the rewards' options by kind."""
    places = {name: folder / name for name in ("clip", "gelu", "yolos", "image_reward")}
    for place in places.values():
        place.mkdir()
    clip = str(tiny_clip.build(places["clip"]))
    gelu = str(tiny_clip.build(places["gelu"], act="gelu"))
    torch.save(open_clip_weights(tiny_clip.model(act="gelu")), folder / "hps.pt")
    torch.save(aesthetic_head(tiny_clip.WIDTH), folder / "head.pth")
    detector(places["yolos"])
    return {
        "pickscore": {"model": clip, "processor": clip}, "clipscore": {"model": clip}, "image_similarity": {"model": clip},
        "aesthetic": {"model": clip, "head": str(folder / "head.pth")},
        "hpsv2": {"checkpoint": str(folder / "hps.pt"), "config": gelu, "processor": gelu},
        "geneval": {"detector": str(places["yolos"]), "clip": clip}, "image_reward": image_reward(places["image_reward"]),
    }


def open_clip_weights(model: Any) -> dict[str, torch.Tensor]:
    """A CLIPModel's weights in open_clip's layout: queries, keys and values in one matrix, projections from the right."""
    state, weights = model.state_dict(), {}
    for key, value in state.items():
        if "q_proj" in key:
            value = torch.cat([state[key.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        elif "k_proj" in key or "v_proj" in key:
            continue
        elif key in ("text_projection.weight", "visual_projection.weight"):
            value = value.T.contiguous()
        weights[hpsv2._open_clip_name(key)] = value
    return weights


def aesthetic_head(width: int) -> dict[str, torch.Tensor]:
    generator, weights = torch.Generator().manual_seed(0), {}
    for layer, out in ((0, 1024), (2, 128), (4, 64), (6, 16), (7, 1)):
        weights[f"layers.{layer}.weight"] = torch.randn((out, width), generator=generator) / width**0.5
        weights[f"layers.{layer}.bias"] = torch.full((out,), 5.0 if out == 1 else 0.0)
        width = out
    return weights


def detector(folder: Path) -> None:
    """A YOLOS that takes everything for dogs which fill the image."""
    model = tiny_yolos.sure_of_1(DETECTED, queries=5)
    corners = model.bbox_predictor.layers[-1]
    corners.weight.data.zero_()
    corners.bias.data.copy_(torch.tensor([0.0, 0.0, 20.0, 20.0]))  # through a sigmoid: centre, width, height
    tiny_yolos.save(folder, model)


def image_reward(folder: Path) -> dict[str, str]:
    _, parts = tiny_image_reward.package()
    own, parts.create_vit = parts.create_vit, tiny_image_reward.small_vit
    try:
        with torch.random.fork_rng(devices=[]):
            return tiny_image_reward.save(folder)
    finally:
        parts.create_vit = own
