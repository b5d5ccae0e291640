"""Encoding and sampling on the rollout pool: when an actor dies or fails, the same request goes to another one."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import ObjectLostError

from actors.dispatch import Task, serving
from actors.pool import ActorPool
from actors.tracebacks import summary
from flowgrpo_ray import startup
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import EncodeMeta, SampleMeta, SampleRequest
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, SyncError, counted, first_line
from flowgrpo_ray.policies.source import CFG_FAMILIES

log = logging.getLogger(__name__)

MAX_PROMPTS = 64  # of one encode call with offloaded encoders
MAX_ATTEMPTS = 3  # an exception of the model's own code (out of memory, say) is tried on other actors before it ends the run


class Sampling:
    """Turns requests into tasks of the rollout pool. Ray never retries them: a retry under newer weights would relabel
    data, while the request submitted again names the version that it wants."""

    def __init__(self, config: Config, pool: ActorPool, family: str) -> None:
        self._timeout, self._offload = config.pools.rollout.timeout_s, config.model.offload_encoders
        self._pool, self._cfg = pool, family in CFG_FAMILIES
        self.negatives: dict[str, ray.ObjectRef] = {}  # conditionings, by text
        self.seconds: dict[str, float] = defaultdict(float)  # busy seconds: encode, sample
        self.calls: Counter[str] = Counter()
        self.peak_memory = 0  # largest accelerator bytes of a call

    def encode(
        self, records: Sequence[PromptRecord], orders: Sequence[tuple], on_ref: Callable[[int, ray.ObjectRef, int], None]
    ) -> None:
        """Encode prompts; `on_ref` gets the place of each in `records`, the ref of its conditioning and its bytes.

        Where encoders are offloaded, a call takes many prompts, as every call moves them to the GPU and back. The bits of a
        conditioning do not depend on the others of its call.
        """
        share = math.ceil(len(records) / max(1, len(serving(self._pool.members))))
        size = min(MAX_PROMPTS, max(1, share)) if self._offload else 1
        for first in range(0, len(records), size):
            part = list(records[first : first + size])

            def done(meta: EncodeMeta, refs: list[ray.ObjectRef], first: int = first) -> None:
                self.seconds["encode"] += meta.seconds
                for number, (ref, nbytes) in enumerate(zip(refs, meta.sizes, strict=True), first):
                    on_ref(number, ref, nbytes)

            what = f"encode {part[0].prompt[:40]!r}" + (f" and {len(part) - 1} more" if len(part) > 1 else "")
            self._submit(what, "encode", (part,), orders[first], done, num_returns=1 + len(part))

    def encode_negatives(self, texts: Sequence[str]) -> None:
        """Encode negative prompts, each once per run."""
        self.encode([PromptRecord(prompt=text) for text in texts], [(-1,)] * len(texts),
                    lambda number, ref, _: self.negatives.__setitem__(texts[number], ref))

    def has_negative(self, text: str) -> bool:
        """Whether a negative prompt is encoded, or is of no use to a model of this family."""
        return not self._cfg or text in self.negatives

    def forget_negatives(self, texts: Sequence[str]) -> None:
        """Between two steps: they are encoded again when they are needed."""
        for text in texts:
            del self.negatives[text]

    def negative(self, text: str | None) -> ray.ObjectRef | None:
        """The conditioning of a negative prompt; None where there is no CFG pass."""
        return self.negatives[text] if self._cfg and text is not None else None

    def sample(
        self, what: str, order: tuple, request: SampleRequest, negative: str | None, conditionings: Sequence[ray.ObjectRef],
        on_sample: Callable[[SampleMeta, ray.ObjectRef, ray.ObjectRef], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Sample one shard; `on_sample` gets its metadata and the refs of its images and trajectory. `on_lost` is called
        instead if a conditioning is lost, with the node that held it."""

        def done(meta: SampleMeta, rest: list[ray.ObjectRef]) -> None:
            startup.reached("first image")
            self.seconds["sample"] += meta.seconds
            self.calls["sample"] += 1
            self.peak_memory = max(self.peak_memory, meta.peak_memory)
            on_sample(meta, *rest)

        args = (request, self.negative(negative), *conditionings)
        self._submit(f"sample {what}", "sample", args, order, done, num_returns=3, on_lost=on_lost)

    def _submit(
        self, what: str, method: str, args: tuple, order: tuple, done: Callable[..., None], *, num_returns: int,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        task = Task(what, method, args, order, self._timeout, done, lambda error: self._failed(task, error, on_lost),
                    num_returns)
        self._pool.submit(task)

    def _failed(self, task: Task, error: Exception, on_lost: Callable[[], None] | None) -> None:
        """Each attempt goes to an actor that has not failed the task; the last one to a new actor, if all have."""
        if on_lost is not None and isinstance(error, ObjectLostError):
            log.warning("%s: what it needs is lost (%s); it is made again", task.what, first_line(error))
            on_lost()
            return
        if isinstance(error, SyncError | ConfigError):
            raise error  # trying again cannot help
        if task.attempts >= MAX_ATTEMPTS:
            raise FlowGrpoError(f"{task.what} failed {counted(task.attempts, 'time')}: {summary(error)}") from error
        log.warning("%s failed: %s; it is submitted again", task.what, summary(error))
        self._pool.submit_again(task, on_fresh_actor=task.attempts == MAX_ATTEMPTS - 1)
