"""Scoring of shards on the reward pools. An error is not a score: a failed batch is scored again image by image, and what
fails twice is masked out (or its group dropped, or the run stopped, by configuration), and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from actors.pool import ActorPool, Task
from flowgrpo_ray.config import Config
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.prompts import PromptRecord

log = logging.getLogger(__name__)


@dataclass
class ShardScores:
    """Scores of one shard: float64 [m] by key (NaN where there is none); `valid` is False where a reward that counts
    failed; `dropped` where such a failure takes the whole group with it."""

    scores: dict[str, np.ndarray]
    valid: np.ndarray
    dropped: bool = False


@dataclass
class _Shard:
    what: str
    order: tuple
    images: ray.ObjectRef
    prompts: list[str]
    metadata: list[dict[str, Any]]
    on_scores: Callable[[ShardScores], None]
    result: ShardScores
    missing: dict[str, int] = field(default_factory=dict)  # reward -> images without an answer yet


class Scoring:
    """Sends every shard to every reward and puts the answers together."""

    def __init__(self, config: Config, pools: dict[str, ActorPool]) -> None:
        self._config, self._pools = config, pools
        self.counts: Counter[str] = Counter()  # retries and failures, by reward: "failures/ocr"
        self.seconds: Counter[str] = Counter()  # busy seconds by reward
        self.calls: Counter[str] = Counter()

    def submit(
        self, what: str, order: tuple, images: ray.ObjectRef, records: Sequence[PromptRecord],
        on_scores: Callable[[ShardScores], None],
    ) -> None:
        """Score one shard; `on_scores` is called once, when every reward has answered or failed for good."""
        m = len(records)
        shard = _Shard(what, order, images, [r.prompt for r in records], [r.metadata for r in records], on_scores,
                       ShardScores({}, np.ones(m, dtype=bool)), dict.fromkeys(self._pools, m))
        for reward in self._pools:
            self._send(shard, reward, None)

    def _send(self, shard: _Shard, reward: str, only: int | None) -> None:
        which = "" if only is None else f" image {only}"
        self._pools[reward].submit(Task(
            what=f"score {shard.what}{which}", method="score", args=(shard.images, shard.prompts, shard.metadata, only),
            order=shard.order, timeout_s=self._config.rewards[reward].timeout_s,
            on_done=lambda answer, _: self._answered(shard, reward, only, answer),
            on_failed=lambda error: self._failed(shard, reward, only, error),
        ))

    def _answered(self, shard: _Shard, reward: str, only: int | None, answer: dict[str, Any]) -> None:
        self.seconds[reward] += answer["seconds"]
        self.calls[reward] += 1
        rows = slice(None) if only is None else slice(only, only + 1)
        for key, values in answer["scores"].items():
            shard.result.scores.setdefault(key, np.full(len(shard.prompts), np.nan))[rows] = values
        self._close(shard, reward, len(shard.prompts) if only is None else 1)

    def _failed(self, shard: _Shard, reward: str, only: int | None, error: Exception) -> None:
        if only is None:
            log.warning("reward %s failed on %s (%s: %s); scoring its images one by one", reward, shard.what,
                        type(error).__name__, _first_line(error))
            self.counts[f"retries/{reward}"] += 1
            for image in range(len(shard.prompts)):
                self._send(shard, reward, image)
            return
        settings = self._config.rewards[reward]
        self.counts[f"failures/{reward}"] += 1
        text = (f"reward {reward} failed twice on {shard.what} image {only} ({shard.prompts[only]!r}): "
                f"{type(error).__name__}: {_first_line(error)}")
        if settings.on_failure == "fail":
            raise FlowGrpoError(f"{text} (rewards.{reward}.on_failure is fail)")
        log.warning("%s; %s", text, "its group is dropped" if settings.on_failure == "drop_group" else "it is masked")
        shard.result.scores.setdefault(reward, np.full(len(shard.prompts), np.nan))
        if settings.weight != 0:
            shard.result.valid[only] = False
            shard.result.dropped |= settings.on_failure == "drop_group"
        self._close(shard, reward, 1)

    @staticmethod
    def _close(shard: _Shard, reward: str, images: int) -> None:
        shard.missing[reward] -= images
        if not any(shard.missing.values()):
            shard.on_scores(shard.result)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
