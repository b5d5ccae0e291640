"""The reward actor. Imports only the standard library, numpy, ray and rewards/base.py: a reward may live in another
environment than the rest."""

from __future__ import annotations

import os
import time

import numpy as np

from flowgrpo_ray.rewards.base import get, validated


class RewardActor:
    """Scores shards of images with one reward."""

    def __init__(self, name: str, options: dict, nice: int = 0) -> None:
        if nice > 0:
            os.nice(max(0, nice - os.nice(0)))
        self._name = name
        self._reward = get(name, **options)

    def score(
        self, images: np.ndarray, prompts: list[str], metadata: list[dict], only: int | None = None
    ) -> dict[str, object]:
        """Scores of a shard, uint8 [m, H, W, 3]; `only` scores one image of it alone.

        Returns {"scores": {name: float64 [n]}, "seconds": …, "cpu_seconds": …}.

        Raises:
            RewardError: the reward answered with NaN, a wrong length, or not its own name; its exceptions pass through.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        if only is not None:
            images, prompts, metadata = images[only : only + 1], prompts[only : only + 1], metadata[only : only + 1]
        result = self._reward.score(images, prompts, metadata)
        scores = validated(result, len(prompts), self._name)
        return {"scores": scores, "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}

    def ready(self) -> int:
        """Answers with the process id once the constructor is through."""
        return os.getpid()
