"""A pool of interchangeable actors: least-loaded dispatch in plan order, deadlines, and replacement of the dead.

The pool decides who does a task and how often; it never decides what the task is. So nothing here can change a result.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError

from actors import head
from actors.environments import setup_reason
from flowgrpo_ray import signals
from flowgrpo_ray.errors import FlowGrpoError, ResourceError, first_line, message_of

log = logging.getLogger(__name__)

# How tracebacks of Python tell an error of ours, to the end of its message, and where the next error of a chain begins.
_OWN = re.compile(r"^flowgrpo_ray\.[\w.]+Error: .*", re.DOTALL | re.MULTILINE)
_CHAINED = re.compile(r"\n\n(?:The above exception was the direct cause of the following exception|"
                      r"During handling of the above exception, another exception occurred):\n\n")

Checked = list[tuple[ray.ObjectRef, Callable[[Any], None]]]  # calls, each with a check of its answer


@dataclass
class Task:
    """One call on any actor of a pool.

    `on_done(value, rest)` gets the first return's value and the refs of the others; `on_failed(error)` an exception of
    the call, a `TimeoutError`, or `ActorKilledError` after the task has killed two actors.

    Where `fill` is not 0, tasks of its `kind` that wait behind it in the queue are joined to it by `join` up to that `size`.
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
    settled: bool = False  # it was given twice, and one of the two has ended


class ActorKilledError(FlowGrpoError):
    """The same task has killed two actors."""


class NoActorError(FlowGrpoError):
    """A task waited for an actor, and none could be started again."""


@dataclass
class _Running:
    task: Task
    refs: list[ray.ObjectRef]
    deadline: float
    moved: bool = False  # given to an idle actor as well


@dataclass
class _Member:
    index: int
    handle: Any  # None while it rests
    starting: Checked
    start_deadline: float
    running: dict[ray.ObjectRef, _Running] = field(default_factory=dict)
    pid: int = 0  # of its process, once it is up
    replaces: bool = False  # one that was at work
    failed_starts: int = 0  # in a row
    rests_until: float = 0.0  # after a start that failed

    @property
    def ready(self) -> bool:
        return self.handle is not None and not self.starting


class ActorPool:
    """`replicas` actors of one kind.

    Args:
        spawn: makes the actor of a member index and incarnation.
        prepare: calls that the new actor has to answer before it gets work, each with a check of the answer that raises
            where it is wrong (a rollout actor loads and proves the current adapter here).
        depth: calls in flight per actor; 2 hides the driver's latency.
        max_deaths: more deaths than these, since the start or the last `forgive_deaths`, and the pool gives up. What hangs is
            not counted: its task fails, and what that means is for the task's owner to say.
        start_hint: ends the error for an actor that was not ready in time.
        rest_s: an actor that replaces another and cannot start is tried again after so many seconds, twice as many each time,
            60 s at most; where no other actor is left, the tasks that waited for it fail with `NoActorError`. None: the first
            such failure is raised, as that of a first start always is.
    """

    def __init__(
        self, name: str, replicas: int, spawn: Callable[[int, int], Any], *, prepare: Callable[[Any], Checked],
        start_timeout_s: float, max_deaths: int, depth: int = 2, respawns: bool = True, start_hint: str = "",
        rest_s: float | None = None,
    ) -> None:
        self.name, self.depth = name, depth
        self._spawn, self._prepare = spawn, prepare
        self._start_timeout, self._max_deaths, self._respawns = start_timeout_s, max_deaths, respawns
        self._start_hint, self._rest = start_hint, rest_s
        self._queue: list[Task] = []
        self.counts: Counter[str] = Counter()  # deaths, timeouts, failed_starts, late_answers
        self._forgiven = 0  # deaths
        self._incarnation = 0
        self._late: list[ray.ObjectRef] = []
        self.members = [self._new_member(index) for index in range(replicas)]

    # Members ----------------------------------------------------------------------------------------------------------

    def _new_member(self, index: int, **history: Any) -> _Member:
        handle = self._spawn(index, self._incarnation)
        self._incarnation += 1
        return _Member(index, handle, self._prepare(handle), time.monotonic() + self._start_timeout, **history)

    def _respawn(self, member: _Member) -> None:
        """A new actor in the place of one that is gone."""
        self.members[self.members.index(member)] = self._new_member(
            member.index, replaces=True, failed_starts=member.failed_starts)

    def prepare_again(self, prepare: Callable[[Any], Checked]) -> None:
        """Make every member answer further calls before it gets more work (a new adapter is out)."""
        for member in self.members:
            if not all(running.task.settled for running in member.running.values()):  # a call taken over may still be about
                raise FlowGrpoError(f"pool {self.name}: new weights while actor {member.index} works under the old ones")
            member.starting = [*member.starting, *prepare(member.handle)]
            member.start_deadline = time.monotonic() + self._start_timeout

    def forgive_deaths(self) -> None:
        """A new step: deaths so far do not count against `max_deaths` any more."""
        self._forgiven = self.counts["deaths"]

    @property
    def all_ready(self) -> bool:
        return all(member.ready for member in self.members)

    @property
    def idle(self) -> bool:
        """Nothing queued and no answer awaited."""
        return not self._queue and all(running.task.settled for member in self.members for running in member.running.values())

    def queued(self, method: str) -> bool:
        """Whether calls of a method wait for an actor."""
        return any(task.method == method for task in self._queue)

    def activity(self) -> list[str]:
        """What each actor is doing, for the live view."""
        return [
            "starting" if m.starting else "cannot start" if not m.ready else next(
                (r.task.what for r in m.running.values()), "idle") for m in self.members
        ]

    # Work -------------------------------------------------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        self._queue.append(task)
        self._queue.sort(key=lambda t: t.order)
        self.pump()

    def pump(self) -> None:
        """Give queued tasks, in plan order, to the least loaded ready actors.

        The last ones, one for each actor, wait here for an actor with nothing to do: none of them shall wait behind a call
        of one actor while another is idle. And a task that may have killed an actor has its second one for itself: the answer
        of a call that came before a death can be lost with it, and must not be held against that call twice."""
        while self._queue:
            alone = self._queue[0].kills > 0 or len(self._queue) < len(self.members)
            free = [m for m in self.members if m.ready and len(m.running) < (1 if alone else self.depth)
                    and not any(running.task.kills for running in m.running.values())]
            if not free:
                return
            member = min(free, key=lambda m: (len(m.running), m.index))
            self._start(member, self._next())
        for idle in [m for m in self.members if m.ready and not m.running]:
            self._take_over(idle)

    def _next(self) -> Task:
        """The first task of the queue, filled up with those behind it where it allows that."""
        tasks = [self._queue.pop(0)]
        while (tasks[0].fill and self._queue and self._queue[0].fill and self._queue[0].kind == tasks[0].kind
               and sum(task.size for task in [*tasks, self._queue[0]]) <= tasks[0].fill):
            tasks.append(self._queue.pop(0))
        return tasks[0] if len(tasks) == 1 else tasks[0].join(tasks)

    def _take_over(self, idle: _Member) -> None:
        """An idle actor does the call that waits behind another's: a slow actor holds up nothing but the call that it is at.

        The slow one does it as well, later: `ray.cancel` of a call of an actor that runs its calls in order can leave a hole
        in their numbering, at which Ray gives up the actor after 30 s. The answers are equal, the first counts."""
        waiting = [running for m in self.members for running in list(m.running.values())[1:] if not running.moved]
        if waiting:
            running = min(waiting, key=lambda running: running.task.order)
            running.moved = True
            self._start(idle, running.task)

    def _start(self, member: _Member, task: Task) -> None:
        refs = getattr(member.handle, task.method).options(num_returns=task.num_returns).remote(*task.args)
        refs = refs if isinstance(refs, list) else [refs]
        # Calls of one actor run one after another: the clock of a queued one starts when it can start.
        earliest = max([time.monotonic(), *(r.deadline for r in member.running.values())])
        member.running[refs[0]] = _Running(task, refs, earliest + task.timeout_s)

    def waiting_for(self) -> list[ray.ObjectRef]:
        """Refs whose readiness is an event of this pool."""
        return [ref for m in self.members for ref in ([ref for ref, _ in m.starting] or m.running)]

    def next_deadline(self) -> float:
        deadlines = [m.start_deadline if m.starting else m.rests_until for m in self.members if not m.ready]
        deadlines += [r.deadline for m in self.members for r in m.running.values()]
        return min(deadlines, default=float("inf"))

    def settle(self, ready: set[ray.ObjectRef]) -> None:
        """Deal with finished calls and with deadlines that have passed, then hand out more work."""
        for member in list(self.members):
            if member.starting and member.starting[0][0] in ready:
                self._go_on_starting(member)
            elif member.starting and time.monotonic() > member.start_deadline:
                free, total = ray.available_resources(), ray.cluster_resources()
                left = ", ".join(f"{kind} {free.get(kind, 0.0):g} of {total.get(kind, 0.0):g}" for kind in ("CPU", "GPU"))
                self._cannot_start(member, ResourceError(
                    f"pool {self.name}: actor {member.index} was not ready within {self._start_timeout:g} s "
                    f"(pools.start_timeout_s): it waits for resources, or is still loading; free now, over all nodes: "
                    f"{left}{self._start_hint}"))
            elif member.handle is None and time.monotonic() > member.rests_until:
                self._respawn(member)
            for ref in [ref for ref in member.running if ref in ready]:
                if ref in member.running:  # a death settles all of a member's calls at once
                    self._finish(member, ref)
            self._expire(member)
        self.pump()

    def _go_on_starting(self, member: _Member) -> None:
        """Take the first answer that a starting actor owes."""
        ref, check = member.starting[0]
        try:
            value = ray.get(ref, timeout=60)
        except RayTaskError as error:
            self._cannot_start(member, _start_error(self.name, member.index, error))
            return
        except RayActorError as error:
            if getattr(error, "actor_init_failed", False):
                self._cannot_start(member, _start_error(self.name, member.index, error))
            else:
                self._died(member, f"while starting: {first_line(error)}")
            return
        except RuntimeEnvSetupError as error:
            self._cannot_start(member, FlowGrpoError(
                f"pool {self.name}: the environment of actor {member.index} could not be made: {setup_reason(error)}"))
            return
        check(value)
        if not member.pid:
            member.pid = value  # the first answer is `ready`'s
        member.starting.pop(0)
        if not member.starting:
            member.failed_starts = 0

    def _cannot_start(self, member: _Member, error: FlowGrpoError) -> None:
        """A first start that fails is the run's failure; a later one may be for a while, and is for its tasks to deal with."""
        if self._rest is None or not member.replaces:
            raise error
        self.counts["failed_starts"] += 1
        ray.kill(member.handle)
        rest = min(60.0, self._rest * 2**member.failed_starts)
        log.warning("%s; it is tried again in %g s", error, rest)
        self.members[self.members.index(member)] = _Member(
            member.index, None, [], 0.0, replaces=True, failed_starts=member.failed_starts + 1,
            rests_until=time.monotonic() + rest)
        if not any(m.ready or m.starting for m in self.members):
            waiting, self._queue = self._queue, []
            for task in waiting:
                self._settle(task, NoActorError(f"no actor of the pool could be started again: {error}"))

    def _finish(self, member: _Member, ref: ray.ObjectRef) -> None:
        try:
            value, failure = ray.get(ref, timeout=60), None
        except RayActorError as error:
            self._died(member, first_line(error))
            return
        except RayTaskError as error:
            value, failure = None, error.cause if isinstance(error.cause, Exception) else error
        except RayError as error:
            value, failure = None, error
        running = member.running.pop(ref)
        self._start_clock(member)
        self._settle(running.task, failure, value, running.refs[1:])

    def _settle(self, task: Task, failure: Exception | None, value: Any = None, rest: Sequence[ray.ObjectRef] = ()) -> None:
        """Tell how a task ended. Of one that two actors do, the first answer counts, and a failure only if it is the last."""
        if task.settled or failure is not None and self._done_by_another(task):
            return
        task.settled = True
        if failure is not None:
            task.on_failed(failure)
        else:
            task.on_done(value, list(rest))

    def _done_by_another(self, task: Task, member: _Member | None = None) -> bool:
        return any(running.task is task for m in self.members if m is not member for running in m.running.values())

    @staticmethod
    def _start_clock(member: _Member) -> None:
        """The next call of the actor starts now: its deadline counts from here."""
        for running in member.running.values():
            running.deadline = min(running.deadline, time.monotonic() + running.task.timeout_s)
            break

    def _died(self, member: _Member, why: str) -> None:
        """An actor is gone: not its tasks' fault until one of them has killed two."""
        head.check()  # it went with Ray
        self.counts["deaths"] += 1
        log.warning("pool %s: actor %d died (%s)", self.name, member.index, why)
        self._salvage(member)
        # Calls run one at a time, so the oldest is the one that can have killed the actor; the others only waited.
        for position, running in enumerate(member.running.values()):
            if position == 0:
                running.task.kills += 1
                running.task.fill = 0  # it is suspect: it waits for its second try by itself
        self._replace(member)

    def _salvage(self, member: _Member) -> None:
        """Calls that were answered before the actor died are done, though their refs were not looked at yet."""
        for ref, running in list(member.running.items()):
            if ray.wait([ref], timeout=0)[0]:
                try:
                    value = ray.get(ref, timeout=60)
                except RayError:
                    continue
                del member.running[ref]
                self._settle(running.task, None, value, running.refs[1:])

    def _replace(self, member: _Member, why: str = "died") -> None:
        if not self._respawns:
            raise FlowGrpoError(f"pool {self.name}: actor {member.index} {why}, and with it a learner rank is lost")
        if self.counts["deaths"] - self._forgiven > self._max_deaths:
            raise FlowGrpoError(f"pool {self.name}: more than {self._max_deaths} actors died within one step "
                                "(pools.max_actor_deaths)")
        tasks = [running.task for running in member.running.values()
                 if not running.task.settled and not self._done_by_another(running.task, member)]
        member.running.clear()
        self._respawn(member)
        for task in tasks:
            if task.kills >= 2:
                self._settle(task, ActorKilledError(f"{task.what} has killed two actors of pool {self.name}"))
            else:
                self._queue.append(task)
        self._queue.sort(key=lambda t: t.order)

    def _expire(self, member: _Member) -> None:
        """The call that runs has passed its deadline: it has failed, and its actor is replaced."""
        late = next(((ref, r) for ref, r in member.running.items() if time.monotonic() > r.deadline), None)
        if late is None:
            return
        ref, running = late
        if ray.wait([ref], timeout=0)[0]:  # answered since `ready` was looked up: it is the driver that is late
            self._finish(member, ref)
            return
        log.warning("pool %s: %s gave no answer within %g s; its actor is replaced", self.name, running.task.what,
                    running.task.timeout_s)
        self.counts["timeouts"] += 1
        del member.running[ref]
        self._late.append(ref)
        ray.kill(member.handle)
        self._replace(member, f"gave no answer to {running.task.what} within {running.task.timeout_s:g} s")
        self._settle(running.task, TimeoutError(f"{running.task.what}: no answer within {running.task.timeout_s:g} s"))

    def count_late_answers(self) -> int:
        """Answers that came after their task had been given up: dropped, and counted."""
        for ref in list(self._late):
            if ray.wait([ref], timeout=0)[0]:
                self._late.remove(ref)
                try:
                    ray.get(ref, timeout=1)
                    self.counts["late_answers"] += 1
                except RayError:
                    pass  # the killed actor's call never answered
        return self.counts["late_answers"]

    def shutdown(self) -> None:
        self._queue.clear()
        for member in self.members:
            if member.handle is not None:
                ray.kill(member.handle)


def _start_error(pool: str, index: int, error: RayError) -> FlowGrpoError:
    """What a user has to know of an actor that could not start: our own errors without the remote traceback."""
    if isinstance(getattr(error, "cause", None), FlowGrpoError):
        text = message_of(error.cause)
    else:
        text = str(error)
        # Of errors that are raised from one another the last one is what the code that knows most has to say.
        own = [part.partition("Error: ")[2] for part in _CHAINED.split(text) for part in _OWN.findall(part)]
        text = own[-1].strip() if own else text
    return FlowGrpoError(f"pool {pool}: actor {index} could not start: {text}")


def wait_for_events(pools: list[ActorPool], others: list[ray.ObjectRef], what: str, *, longest_s: float) -> set[ray.ObjectRef]:
    """Block until some call of the pools or of `others` is finished, or the next deadline has passed.

    Raises:
        FlowGrpoError: nothing is in flight (a wait that could never end).
    """
    signals.check()
    head.check()
    refs = [ref for pool in pools for ref in pool.waiting_for()] + others
    deadline = min((pool.next_deadline() for pool in pools), default=float("inf"))
    if not refs and deadline == float("inf"):
        raise FlowGrpoError(f"waiting for {what}, but nothing is in flight")
    timeout = max(0.01, min(longest_s, deadline - time.monotonic()))
    if not refs:
        time.sleep(timeout)
        return set()
    ready, rest = ray.wait(refs, num_returns=1, timeout=timeout)
    if ready and rest:
        more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
        ready += more
    return set(ready)


def drive(pools: list[ActorPool], done: Callable[[], bool], what: str) -> None:
    """Handle the events of pools that nothing else works with, until `done()`."""
    while not done():
        ready = wait_for_events(pools, [], what, longest_s=0.2)
        for pool in pools:
            pool.settle(ready)
