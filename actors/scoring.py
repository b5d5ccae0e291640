"""Scoring of shards on the reward pools. An error is not a score: a failed batch is given to another actor as it is, then its
images are scored again one by one, and what has no score then is masked out (or its group dropped, or the run stopped, by
configuration), and counted."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from actors.dispatch import ActorKilledError, NoActorError, Task
from actors.pool import ActorPool
from actors.reward import PLACE
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, counted, described
from flowgrpo_ray.preflight import known_class
from flowgrpo_ray.rewards.base import batch_size_of

log = logging.getLogger(__name__)


@dataclass
class ShardScores:
    """Scores of one shard: float64 [m] by key (NaN where there is none), and bool [m]: `valid` is False where a reward
    that counts failed; `dropped` is True where such a failure takes the whole group of the row with it."""

    scores: dict[str, np.ndarray]
    valid: np.ndarray
    dropped: np.ndarray


@dataclass
class _Shard:
    what: str
    order: tuple
    images: ray.ObjectRef
    prompts: list[str]
    metadata: list[dict[str, Any]]
    size_wanted: tuple[int | None, int | None]  # height and width by the prompts; images of a call are of one size
    on_scores: Callable[[ShardScores], None]
    result: ShardScores
    missing: dict[str, int] = field(default_factory=dict)  # reward -> images without an answer yet

    @property
    def size(self) -> int:
        return len(self.prompts)


@dataclass
class _Batch:
    """What one scoring call is for: all images of some shards, or those of `part` of them."""

    reward: str
    shards: list[_Shard]
    group: int | None = None  # of a reward that scores whole groups
    part: range | None = None
    retries: int = 0

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards) if self.part is None else len(self.part)

    @property
    def what(self) -> str:
        name = self.shards[0].what + (f" and {len(self.shards) - 1} more" if len(self.shards) > 1 else "")
        if self.part is None:
            return name
        return f"{name} image {self.part[0]}" if self.group is None else f"{name} (group {self.group})"

    def rows(self) -> Iterator[tuple[_Shard, int]]:
        """(shard, row in it) of every image, in the order of the call's answer."""
        every = [(shard, row) for shard in self.shards for row in range(shard.size)]
        yield from every if self.part is None else every[self.part.start : self.part.stop]


class Scoring:
    """Sends every shard to every reward and puts the answers together."""

    def __init__(self, config: Config, pools: dict[str, ActorPool]) -> None:
        self._config, self._pools = config, pools
        self.counts: Counter[str] = Counter()  # retries and failures, by reward: "failures/ocr"
        self.seconds: dict[str, float] = defaultdict(float)  # busy seconds by reward
        self.calls: Counter[str] = Counter()
        self.images: Counter[str] = Counter()  # images scored, by reward
        self._asked: Counter[str] = Counter()  # images and failures by reward since the last `check_budget`
        self._failures: Counter[str] = Counter()
        self._expected: float = float("inf")  # images that each reward will be asked for until `check_budget`
        classes = {name: known_class(name, config.rewards[name]) for name in pools}
        self._of_groups = {name for name, cls in classes.items() if cls is not None and cls.scope == "group"}
        self._owners: dict[str, str] = {name: name for name in config.rewards}  # which reward gives the score of a name
        # Images that one call of a batch-invariant reward is filled up to; what its self-test has not checked is not believed.
        self._fill = {
            name: batch_size_of(cls, config.rewards[name].options) for name, cls in classes.items()
            if cls is not None and cls.batch_invariant and cls.scope == "sample" and config.rewards[name].self_test}
        self._noted: set[tuple[str, str]] = set()  # rewards and the notes of theirs that were logged
        self._repeats: Counter[tuple[str, str]] = Counter()  # rewards and their errors since the last `check_budget`
        self._groups: dict[tuple[str, tuple], list[_Shard]] = {}  # shards of groups that are not whole yet

    def due(self, step: int) -> list[str]:
        """Rewards that score a training step (counted from 1): all but the monitors that leave it out."""
        return [name for name in self._pools if step % self._config.rewards[name].every_steps == 0]

    @property
    def of_images(self) -> list[str]:
        """Rewards that score an image by itself: those that an evaluation can use."""
        return [name for name in self._pools if name not in self._of_groups]

    def submit(
        self, what: str, order: tuple, images: ray.ObjectRef, records: Sequence[PromptRecord],
        on_scores: Callable[[ShardScores], None], *, rewards: Sequence[str], groups: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Score one shard; `on_scores` is called once, when every reward has answered or failed for good.

        Args:
            order: plan order; a group's shards agree in all but the last part.
            rewards: names of the rewards to ask.
            groups: (id, number of its shards) of each of the shard's groups, in order and of equal size, for rewards that
                score whole groups. A shard of several groups holds each of them alone.
        """
        m = len(records)
        shard = _Shard(what, order, images, [r.prompt for r in records], [r.reward_metadata for r in records],
                       (records[0].height, records[0].width), on_scores,
                       ShardScores({}, np.ones(m, dtype=bool), np.zeros(m, dtype=bool)), dict.fromkeys(rewards, m))
        if not rewards:
            on_scores(shard.result)
        for reward in rewards:
            self._asked[reward] += m
            if reward not in self._of_groups:
                self._send(_Batch(reward, [shard]))
                continue
            if len(groups) > 1:
                size = m // len(groups)
                for start, (group, _) in zip(range(0, m, size), groups, strict=True):
                    self._send(_Batch(reward, [shard], group, range(start, start + size)))
                continue
            [(group, count)] = groups
            waiting = self._groups.setdefault((reward, order[:-1]), [])
            waiting.append(shard)
            if len(waiting) == count:
                del self._groups[reward, order[:-1]]
                self._send(_Batch(reward, sorted(waiting, key=lambda s: s.order), group))

    def expect(self, images: int) -> None:
        """So many images come until the next `check_budget`: a budget that they cannot keep any more stops the run at once."""
        self._expected = images

    def check_budget(self) -> None:
        """Raises FlowGrpoError where a reward failed on too many of the images since the last call."""
        for (reward, text), count in self._repeats.items():
            if count > 1:
                log.warning("reward %s failed %s in this way: %s", reward, counted(count - 1, "more time"), text)
        self._repeats.clear()
        for reward, images in self._asked.items():
            self._check_budget(reward, images)
        self._asked.clear()
        self._failures.clear()
        self._expected = float("inf")

    def _check_budget(self, reward: str, images: float) -> None:
        allowed, failed = self._config.rewards[reward].max_failure_rate, self._failures[reward]
        if failed > allowed * images:
            raise FlowGrpoError(f"reward {reward} has no score for {failed} of {counted(int(images), 'image')}, more than "
                                f"rewards.{reward}.max_failure_rate = {allowed:g} allows; the log says why")

    def _send(self, batch: _Batch) -> None:
        whole = batch.part is None and batch.retries == 0
        self._pools[batch.reward].submit(self._task(batch, fill=self._fill.get(batch.reward, 0) if whole else 0))

    def _join(self, tasks: list[Task]) -> Task:
        """One task for the shards of several."""
        return self._task(_Batch(tasks[0].payload.reward, [shard for task in tasks for shard in task.payload.shards]))

    def _task(self, batch: _Batch, fill: int = 0) -> Task:
        shards = batch.shards
        ids = None if batch.group is None else [batch.group] * batch.size
        part = None if batch.part is None else (batch.part.start, batch.part.stop)
        prompts, metadata = [p for s in shards for p in s.prompts], [d for s in shards for d in s.metadata]
        task = Task(
            what=f"score {batch.what}", method="score", args=(prompts, metadata, ids, part, *(s.images for s in shards)),
            order=shards[0].order, timeout_s=self._config.rewards[batch.reward].timeout_s,
            on_done=lambda answer, _: self._answered(batch, answer), on_failed=lambda error: self._failed(batch, task, error),
            size=batch.size, fill=fill, kind=shards[0].size_wanted, payload=batch, join=self._join,
        )
        return task

    def _answered(self, batch: _Batch, answer: dict[str, Any]) -> None:
        self.seconds[batch.reward] += answer["seconds"]
        self.calls[batch.reward] += 1
        self.images[batch.reward] += batch.size
        for note in answer["notes"]:
            if (batch.reward, note) not in self._noted:
                self._noted.add((batch.reward, note))
                log.warning("reward %s: %s", batch.reward, note)
        rows = list(batch.rows())
        for key, values in answer["scores"].items():
            owner = self._owners.setdefault(key, batch.reward)
            if owner != batch.reward:
                raise FlowGrpoError(f"rewards {owner} and {batch.reward} both give a score named {key!r}: give one of them "
                                    "another name (rewards.<name>, with type or python)")
            for (shard, row), value in zip(rows, values, strict=True):
                shard.result.scores.setdefault(key, np.full(shard.size, np.nan))[row] = value
        self._close(batch.reward, rows)

    def _failed(self, batch: _Batch, task: Task, error: Exception) -> None:
        reward, settings = batch.reward, self._config.rewards[batch.reward]
        if isinstance(error, ConfigError):  # it would be so for every image
            raise FlowGrpoError(str(error)) from error
        why = described(error) + _place(error)
        self._repeats[reward, why] += 1
        level = logging.WARNING if self._repeats[reward, why] == 1 else logging.DEBUG  # what repeats is counted
        text = f"reward {reward} failed on {batch.what}: {why}"
        pool, no_actor_s_fault = self._pools[reward], isinstance(error, TimeoutError | ActorKilledError | NoActorError)
        if task.attempts == 1 and not no_actor_s_fault and pool.has_another(task):
            log.log(level, "%s; another actor is asked", text)
            pool.submit_again(task)
            return
        if batch.retries < settings.retries:
            self.counts[f"retries/{reward}"] += 1
            alone = batch.group is None and batch.part is None
            log.log(level, "%s; %s", text, "scoring its images one by one" if alone else "scoring it again")
            again = ([_Batch(reward, [shard], None, range(row, row + 1), batch.retries + 1) for shard, row in batch.rows()]
                     if alone else [_Batch(reward, batch.shards, batch.group, batch.part, batch.retries + 1)])
            for each in again:
                self._send(each)
            return
        rows = list(batch.rows())
        self.counts[f"failures/{reward}"] += len(rows)
        self._failures[reward] += len(rows)
        text = f"{text} (prompt {rows[0][0].prompts[rows[0][1]]!r}, {counted(batch.retries, 'retry')})"
        if settings.on_failure == "fail":
            raise FlowGrpoError(f"{text} (rewards.{reward}.on_failure is fail)")
        log.log(level, "%s; %s", text, "it has no score" if settings.weight == 0 else
                    "its group is dropped" if settings.on_failure == "drop_group" else "it is masked")
        self._check_budget(reward, self._expected)
        for shard, row in rows:
            shard.result.scores.setdefault(reward, np.full(shard.size, np.nan))
            if settings.weight != 0:
                shard.result.valid[row] = False
                shard.result.dropped[row] |= settings.on_failure == "drop_group"
        self._close(reward, rows)

    @staticmethod
    def _close(reward: str, rows: list[tuple[_Shard, int]]) -> None:
        for shard, _ in rows:
            shard.missing[reward] -= 1
            if not any(shard.missing.values()):
                shard.on_scores(shard.result)


def _place(error: Exception) -> str:
    """File and line of the user's own code that an error of a reward came from, if it is known."""
    places = [note.removeprefix(PLACE) for note in getattr(error, "__notes__", ()) if note.startswith(PLACE)]
    return f" ({places[-1]})" if places else ""
