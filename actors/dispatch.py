"""Who may do a task of a pool: what it and the actors have been through, and whom that leaves.

Nothing here calls Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from flowgrpo_ray.errors import FlowGrpoError

Checked = list[
    tuple[ray.ObjectRef, Callable[[Any], None]]
]  # calls, each with a check of its answer


EVENTS = ("deaths", "timeouts", "failed_starts", "taken_out", "repeated")  # counted of a pool


@dataclass(eq=False)
class Task:
    """One call on any actor of a pool.

    `on_done(value, rest)` gets the first return's value and the refs of the others;
    `on_failed(error)` an exception of the call, a `TimeoutError`, or `ActorKilledError` after the
    task has killed two actors. It may give the task to the pool again with `submit_again`.

    Where `fill` is not 0, tasks of its `kind` that wait behind it in the queue are joined to it by
    `join` up to that `size`.
    """

    what: str  # for people: logs and errors
    method: str
    args: tuple
    order: tuple  # plan order; smaller goes first
    timeout_s: float
    on_done: Callable[[Any, list[ray.ObjectRef]], None]
    on_failed: Callable[[Exception], None]
    num_returns: int = 1
    size: int = 0
    fill: int = 0
    kind: Any = None
    payload: Any = None
    join: Callable[[list[Task]], Task] | None = None
    kills: int = 0
    attempts: int = 1  # 1 + the times that it was submitted again
    failed_on: set[int] = field(default_factory=set)  # incarnations of actors that failed it
    settled: bool = False  # its end was told; if it was given twice, the other call may still run


class ActorKilledError(FlowGrpoError):
    """The same task has killed two actors."""


class NoActorError(FlowGrpoError):
    """A task waited for an actor, and none could be started again."""


class FailureRecord:
    """Failures of one actor since its last success, for each method by itself.

    A failure is open until another actor has made the same call: if that one does it well, the
    failure is the actor's own; if nobody does, it was the call's, and is forgotten.
    """

    def __init__(self) -> None:
        self._open: list[Task] = []
        self._own: Counter[str] = Counter()

    def failed(self, call: Task) -> None:
        self._open.append(call)

    def succeeded(self, method: str) -> None:
        """A call of this method went well: what the actor failed at before was no lasting fault."""
        self._open = [call for call in self._open if call.method != method]
        self._own.pop(method, None)

    def done_by_another(self, call: Task) -> None:
        if call in self._open:
            self._open.remove(call)
            self._own[call.method] += 1

    def forget(self, call: Task) -> None:
        """Nobody could do the call."""
        if call in self._open:
            self._open.remove(call)

    @property
    def own(self) -> int:
        """Failures in a row, of one method, that were the actor's own."""
        return max(self._own.values(), default=0)

    @property
    def possible(self) -> int:
        """The same with those that are still open."""
        total = self._own + Counter(call.method for call in self._open)
        return max(total.values(), default=0)


@dataclass
class Running:
    task: Task
    refs: list[ray.ObjectRef]
    deadline: float
    moved: bool = False  # given to an idle actor as well


@dataclass(eq=False)
class Member:
    index: int
    incarnation: int
    handle: Any  # None while it rests
    starting: Checked
    start_deadline: float
    running: dict[ray.ObjectRef, Running] = field(default_factory=dict)
    pid: int = 0  # of its process, once it is up
    node: str = ""  # its address, once it is up
    node_id: str = ""  # Ray's
    replaces: bool = False  # one that was at work
    was_ready: bool = False
    newcomer: bool = False  # added by `resize`, and not ready yet
    draining: bool = False  # ends with its last call
    failed_starts: int = 0  # in a row
    rests_until: float = 0.0  # after a start that failed
    record: FailureRecord = field(default_factory=FailureRecord)

    @property
    def ready(self) -> bool:
        return self.handle is not None and not self.starting

    @property
    def up(self) -> bool:
        """Its constructor is through."""
        return self.pid != 0

    @property
    def busy(self) -> bool:
        """It has calls whose answers are still awaited."""
        return not all(running.task.settled for running in self.running.values())


def serving(members: Sequence[Member]) -> list[Member]:
    """All but those that `resize` has added and that are not ready yet, and those that it ends."""
    return [m for m in members if not (m.newcomer or m.draining)]


def trusted(members: Sequence[Member], max_failures: int) -> list[Member]:
    """Living actors but those whose last failures may all be their own; all, if none is left."""
    living = [m for m in serving(members) if m.handle is not None]
    return [m for m in living if m.record.possible < max_failures] or living


def candidates(task: Task, members: Sequence[Member], max_failures: int) -> list[Member]:
    """Actors that may do a task; of one that has failed, the least suspect that did not fail it."""
    others = [m for m in serving(members) if m.handle is not None and m.incarnation not in task.failed_on]
    if not task.failed_on or not others:
        return trusted(members, max_failures)
    least = min(m.record.possible for m in others)
    return [m for m in others if m.record.possible == least]


def match(
    queue: Sequence[Task], members: Sequence[Member], depth: int, max_failures: int
) -> tuple[int, Member] | None:
    """Place in the queue of the first task that an actor is free for, and the least loaded one.

    The last tasks, one for each actor, wait for an actor with nothing to do: none of them shall
    wait behind a call of one actor while another is idle. And a task that may have killed an actor
    has its second one for itself: the answer of a call that came before a death can be lost with
    it, and must not be held against that call twice. An actor whose last call failed has one at a
    time.
    """
    last = len(queue) < len(trusted(members, max_failures))
    for position, task in enumerate(queue):
        room = 1 if task.kills or last else depth
        free = [
            m
            for m in candidates(task, members, max_failures)
            if m.ready
            and len(m.running) < (1 if m.record.possible else room)
            and not any(running.task.kills for running in m.running.values())
        ]
        if free:
            return position, min(free, key=lambda m: (len(m.running), m.index))
        if not task.failed_on:
            return None  # only a task that waits for certain actors lets others by
    return None
