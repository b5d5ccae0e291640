"""Encoding and sampling on the rollout pool: when an actor dies or fails, the same request goes to another one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import ray

from actors.dispatch import Task
from actors.pool import ActorPool
from flowgrpo_ray import startup
from flowgrpo_ray.config import Config
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, SyncError
from flowgrpo_ray.prompts import PromptRecord
from flowgrpo_ray.trajectory import SampleMeta, SampleRequest

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # an exception of the model's own code (out of memory, say) is tried on other actors before it ends the run


class Sampling:
    """Turns requests into tasks of the rollout pool. Ray never retries them: a retry under newer weights would relabel
    data, while the request submitted again names the version that it wants."""

    def __init__(self, config: Config, pool: ActorPool) -> None:
        self._timeout = config.pools.rollout.timeout_s
        self._pool = pool
        self._negatives: dict[str, ray.ObjectRef] = {}
        self.seconds: Counter[str] = Counter()  # busy seconds: encode, sample
        self.calls: Counter[str] = Counter()
        self.peak_memory = 0  # largest accelerator bytes of a call

    def encode(self, record: PromptRecord, order: tuple, on_ref: Callable[[ray.ObjectRef], None]) -> None:
        """Encode one prompt; `on_ref` gets the ref of its conditioning."""

        def done(seconds: float, rest: list[ray.ObjectRef]) -> None:
            self.seconds["encode"] += seconds
            on_ref(rest[0])

        self._submit(f"encode {record.prompt[:40]!r}", "encode", (record,), order, done, num_returns=2)

    def encode_negative(self, text: str) -> None:
        """Encode a negative prompt, once per run and text."""
        self.encode(PromptRecord(prompt=text), (-1,), lambda ref: self._negatives.__setitem__(text, ref))

    def has_negative(self, text: str) -> bool:
        return text in self._negatives

    def negative(self, text: str | None) -> ray.ObjectRef | None:
        return None if text is None else self._negatives[text]

    def sample(
        self, what: str, order: tuple, request: SampleRequest, negative: str | None, conditionings: Sequence[ray.ObjectRef],
        on_sample: Callable[[SampleMeta, ray.ObjectRef, ray.ObjectRef], None],
    ) -> None:
        """Sample one shard; `on_sample` gets its metadata and the refs of its images and trajectory."""

        def done(meta: SampleMeta, rest: list[ray.ObjectRef]) -> None:
            startup.reached("first image")
            self.seconds["sample"] += meta.seconds
            self.calls["sample"] += 1
            self.peak_memory = max(self.peak_memory, meta.peak_memory)
            on_sample(meta, *rest)

        args = (request, self.negative(negative), *conditionings)
        self._submit(f"sample {what}", "sample", args, order, done, num_returns=3)

    def _submit(
        self, what: str, method: str, args: tuple, order: tuple, done: Callable[..., None], *, num_returns: int
    ) -> None:
        task = Task(what, method, args, order, self._timeout, done, lambda error: self._failed(task, error), num_returns)
        self._pool.submit(task)

    def _failed(self, task: Task, error: Exception) -> None:
        """Each attempt goes to an actor that has not failed the task; the last one to a new actor, if all have."""
        if isinstance(error, SyncError | ConfigError):
            raise error  # trying again cannot help
        if task.attempts >= MAX_ATTEMPTS:
            raise FlowGrpoError(f"{task.what} failed {task.attempts} times: {type(error).__name__}: {error}") from error
        log.warning("%s failed (%s: %s); it is submitted again", task.what, type(error).__name__, error)
        self._pool.submit_again(task, on_fresh_actor=task.attempts == MAX_ATTEMPTS - 1)
