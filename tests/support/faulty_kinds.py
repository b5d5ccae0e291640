"""Every kind of reward with faults: `faulty_kinds:KIND` is the built-in class, which goes wrong on marked images.

The mark, in the first pixel, says how. What a fault does not touch is scored by the class itself, in the same call.
"""

from __future__ import annotations

import os
import signal
import time
from functools import lru_cache, partial
from typing import Any

import numpy as np
import own_rewards

from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.rewards import reward_class

ACTOR = ("raise", "hang", "nan", "short", "empty", "die")  # of the scoring call
MODEL = ("model_nan",)  # NaN comes out of the network, for the marked image alone
COLOUR = ("colour_nan",)  # the same of the second network of geneval
SERVER = ("http_500", "http_hang", "http_close", "http_nan", "http_short", "http_empty", "http_unparsable", "http_outside")
FAULTS = (*ACTOR, *MODEL, *COLOUR, *SERVER)
MARK = (201, 7)  # red and green of the mark; blue is the fault's number


def marked(images: np.ndarray, row: int, fault: str) -> np.ndarray:
    """A copy of images, or of videos, in which one bears the mark of a fault."""
    images = images.copy()
    images[row].reshape(-1, 3)[0] = (*MARK, FAULTS.index(fault))
    return images


def fault_of(image: np.ndarray) -> str | None:
    red, green, blue = map(int, image.reshape(-1, 3)[0])
    return FAULTS[blue] if (red, green) == MARK and blue < len(FAULTS) else None


def spoiled(scores: dict[str, Any], images: np.ndarray) -> dict[str, Any]:
    """What a call answers that has marked images in it."""
    scores = {key: np.array(values) for key, values in scores.items()}
    for row, fault in enumerate(map(fault_of, images)):
        if fault == "raise":
            raise ValueError("this image is beyond me")
        if fault == "hang":
            time.sleep(3600)
        if fault == "die":
            time.sleep(0.3)  # the answer of the call before is under way
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "nan":
            next(iter(scores.values()))[row] = np.nan
        if fault in ("short", "empty"):
            scores = {key: values[:-1] if fault == "short" else values[:0] for key, values in scores.items()}
    return scores


class Faulty:
    """Before a reward class."""

    def __init__(self, **options: Any) -> None:
        if self.name == "image_reward":
            import tiny_image_reward

            tiny_image_reward.package()[1].create_vit = tiny_image_reward.small_vit
        super().__init__(**options)
        self._faults: list[str | None] = []  # of the images of a call
        self._passed: dict[str, int] = {}  # images that went through a network in it
        for fault, network in zip((*MODEL, *COLOUR), networks(self), strict=False):
            network.register_forward_hook(partial(self._spoil, fault))

    def _spoil(self, fault: str, network: Any, args: Any, output: Any) -> None:
        """Images pass in the order of the call, one or a few at a time."""
        parts = [getattr(output, key) for key in ("pooler_output", "logits", "pred_boxes") if hasattr(output, key)]
        tensors = parts or [output]
        first = self._passed.get(fault, 0)
        self._passed[fault] = first + len(tensors[0])
        for row, found in enumerate(self._faults[first : first + len(tensors[0])]):
            for tensor in tensors if found == fault else ():
                tensor[row] = float("nan")

    def score(self, images: Any, prompts: Any, metadata: Any, *, group_ids: Any = None) -> dict[str, Any]:
        self._faults, self._passed = [fault_of(image) for image in images], {}
        return spoiled(super().score(images, prompts, metadata, group_ids=group_ids), images)


def networks(reward: Any) -> list[Any]:
    """The networks that images go into."""
    if hasattr(reward, "clip"):
        return [reward.clip._model.vision_model]
    if reward.name == "image_reward":
        return [reward._model.blip.visual_encoder]
    if hasattr(reward, "_detector"):
        return [reward._detector._model, reward._colours._clip._model.vision_model]
    return []


@lru_cache
def _of_kind(kind: str) -> type:
    return type(f"Faulty_{kind}", (Faulty, reward_class(kind)), {})


def __getattr__(kind: str) -> type:
    try:
        return _of_kind(kind)
    except ConfigError:
        raise AttributeError(kind) from None


def function(images, prompts, metadata):
    """Brightness."""
    return spoiled({"function": own_rewards.brightness(images, prompts, metadata)}, images)


def group(images, prompts, metadata, group_ids):
    """Place in the group."""
    return spoiled({"group": own_rewards.rank_in_group(images, prompts, metadata, group_ids)}, images)


group.scope = "group"
