"""What a run is at: the driver's clock of its waits, and the `RunStatus` that it makes about once a second."""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from flowgrpo_ray import storage
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.views.status import RunStatus, seconds_left

if TYPE_CHECKING:
    from actors.controller import Controller

T = TypeVar("T")

EVERY_S = 1.0  # that a status is made

_REASONS = {"starting": "actors", "syncing": "sync", "evaluating": "evaluation", "checkpointing": "checkpoint"}


class Activity:
    """What the driver is doing, and how long it has waited for what.

    Attributes:
        phase: as in `RunStatus`; while a step is in progress "sampling".
        waiting_for: in words; empty while it waits for nothing.
        waiting_s: seconds waited, by reason.
    """

    def __init__(self) -> None:
        self.phase, self.waiting_for = "starting", ""
        self.waiting_s: dict[str, float] = defaultdict(float)
        self.started = time.time()
        self.images_per_s: float | None = None
        self._steps: deque[float] = deque(maxlen=100)  # seconds of the last steps
        self._since = self._recorded = time.monotonic()
        self._reason, self._next_status = "", 0.0

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """The phase is this one within the block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            if self.waiting_for:
                self.wait(self.waiting_for, self._reason)
            self.phase, self.waiting_for = before, ""

    def wait(self, what: str, reason: str) -> None:
        """Count what has passed since the last call as waited, if that was for the same."""
        now = time.monotonic()
        if what == self.waiting_for:
            self.waiting_s[reason] += now - self._since
        self.waiting_for, self._since, self._reason = what, now, reason

    def status_due(self) -> bool:
        """Whether it is time for the next status; True about once a second."""
        now = time.monotonic()
        if now < self._next_status:
            return False
        self._next_status = now + EVERY_S
        return True

    def recorded(self, row: Row) -> None:
        """A row is recorded: of a finished step, or of the evaluation before the first."""
        self.images_per_s = row.get("images_per_s", self.images_per_s)
        if "time_step" in row:
            self._steps.append(row["time_step"])
        self._recorded = time.monotonic()

    def seconds_left(self, steps_left: int) -> float | None:
        """Estimate of the time left, None before the first step."""
        return seconds_left(list(self._steps), steps_left, time.monotonic() - self._recorded)


def during(phase: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A method of the controller in which the phase is this one."""
    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def within(controller: Controller, *args: Any) -> T:
            with controller.activity.doing(phase):
                return method(controller, *args)
        return within
    return decorate


def waiting_reason(controller: Controller) -> str:
    """What keeps the driver waiting; within a step the earliest stage that has work."""
    phase = controller.activity.phase
    if phase != "sampling":
        return _REASONS[phase]
    if not controller.rollouts.idle:
        return "rollout"
    return "learner" if all(pool.idle for pool in controller.rewards.values()) else "reward"


def run_status(controller: Controller) -> RunStatus:
    """The state of a run now; no call is made for it."""
    activity, recorder, board = controller.activity, controller.recorder, controller.board
    last, steps, phase = controller.last, controller.config.run.steps, activity.phase
    if phase == "sampling" and board is not None and board.all_sampled:
        phase = "learning"
    pools = {pool.name: pool.status() for pool in controller.pools}
    if controller.group is not None:
        pools["learner"] = controller.group.status()
    if controller.commands.stopping or controller.commands.ending:
        phase = "stopping"
    saved = last.checkpoint
    return RunStatus(
        run=controller.config.run.name, run_id=recorder.run_id, run_dir=storage.display(recorder.run_dir or ""),
        phase=phase, step=last.finished, steps=steps, version=controller.version,
        images_per_s=activity.images_per_s, seconds_left=activity.seconds_left(steps - last.finished),
        waiting_for=activity.waiting_for, waiting_s=dict(activity.waiting_s), queue=board.queue() if board else {},
        checkpoint_step=saved.step if saved else None, checkpoint_time=saved.time if saved else None,
        checkpoint_bytes=saved.nbytes if saved else None,
        object_store_bytes=board.held_bytes if board else 0, pools=pools, time=time.time(), started=activity.started)
