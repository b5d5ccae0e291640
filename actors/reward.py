"""The reward actor. Imports only the standard library, numpy, ray and rewards/base.py: a reward may live in another
environment than the rest."""

from __future__ import annotations

import os
import time

import numpy as np

from flowgrpo_ray.rewards import get, validated
from flowgrpo_ray.rewards.base import renamed


class RewardActor:
    """Scores batches of images with one reward.

    Args:
        name: key of the reward in the configuration; its scores carry this name.
        spec: what the registry is asked for: a reward's name, or `module:attribute`.
        self_test: score known pictures first; RewardError where that goes wrong.
    """

    def __init__(self, name: str, spec: str, options: dict, self_test: bool = True, nice: int = 0) -> None:
        if nice > 0:
            os.nice(max(0, nice - os.nice(0)))
        self._name = name
        self._reward = get(spec, **options)
        self._kind = self._reward.name
        if self_test:
            self._reward.self_test()

    def score(
        self, prompts: list[str], metadata: list[dict], group_ids: list[int] | None, only: int | None, *shards: np.ndarray
    ) -> dict[str, object]:
        """Scores of the images of one or more shards, uint8 [m, H, W, 3] each; `only` scores one image of them alone.

        Returns {"scores": {name: float64 [n]}, "seconds": …, "cpu_seconds": …}.

        Raises:
            RewardError: the reward answered with NaN, a wrong length, or not its own name; its exceptions pass through.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        images = shards[0] if len(shards) == 1 else np.concatenate(shards)
        if only is not None:
            images, prompts, metadata = images[only : only + 1], prompts[only : only + 1], metadata[only : only + 1]
        scores = validated(self._reward.score(images, prompts, metadata, group_ids=group_ids), len(prompts), self._kind)
        return {"scores": renamed(scores, self._kind, self._name),
                "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}

    def ready(self) -> int:
        """Answers with the process id once the constructor is through."""
        return os.getpid()
