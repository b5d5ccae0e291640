"""A pool of interchangeable actors: least-loaded dispatch in plan order, deadlines, and replacement of the dead and the sick.

The pool decides who does a task and how often; it never decides what the task is. So nothing here can change a result.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError

from actors import head
from actors.dispatch import (
    EVENTS,
    ActorKilledError,
    Checked,
    FailureRecord,
    Member,
    NoActorError,
    Running,
    Task,
    match,
    trusted,
)
from actors.environments import setup_reason
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, ResourceError, SyncError, counted, first_line, message_of
from flowgrpo_ray.status import PoolStatus

log = logging.getLogger(__name__)

# How tracebacks of Python tell an error of ours, to the end of its message, and where the next error of a chain begins.
_OWN = re.compile(r"^flowgrpo_ray\.[\w.]+Error: .*", re.DOTALL | re.MULTILINE)
_CHAINED = re.compile(r"\n\n(?:The above exception was the direct cause of the following exception|"
                      r"During handling of the above exception, another exception occurred):\n\n")

class ActorPool:
    """`replicas` actors of one kind.

    Args:
        spawn: makes the actor of a member index and incarnation.
        prepare: calls that the new actor has to answer before it gets work, each with a check of the answer that raises
            where it is wrong (a rollout actor loads and proves the current adapter here).
        depth: calls in flight per actor; 2 hides the driver's latency.
        max_deaths: more deaths than these (actors taken out are counted with them), since the start or the last
            `forgive_deaths`, and the pool gives up. What hangs is not counted: its task fails, and what that means is for the
            task's owner to say.
        max_failures_in_a_row: an actor that has failed so many calls in a row, all of which others then did well, is taken
            out and replaced. While that is open it gets no work, if others are there to do it.
        start_hint: ends the error for an actor that was not ready in time.
        rest_s: an actor that replaces another and cannot start is tried again after so many seconds, twice as many each time,
            60 s at most; where no other actor is left, the tasks that waited for it fail with `NoActorError`. None: the first
            such failure is raised, as that of a first start always is.
        needed: the run cannot go on without an actor: where no other one is left, a failed start is raised.
    """

    def __init__(
        self, name: str, replicas: int, spawn: Callable[[int, int], Any], *, prepare: Callable[[Any], Checked],
        start_timeout_s: float, max_deaths: int, max_failures_in_a_row: int = 3, depth: int = 2, respawns: bool = True,
        start_hint: str = "", rest_s: float | None = None, needed: bool = False,
    ) -> None:
        self.name, self.depth = name, depth
        self._spawn, self._prepare = spawn, prepare
        self._start_timeout, self._max_deaths, self._respawns = start_timeout_s, max_deaths, respawns
        self._max_failures, self._start_hint = max_failures_in_a_row, start_hint
        self._rest, self._needed = rest_s, needed
        self._queue: list[Task] = []
        self.counts: Counter[str] = Counter()  # deaths, taken_out, repeated, timeouts, failed_starts, late_answers
        self._forgiven = 0  # actors lost
        self._incarnation = 0
        self._late: list[ray.ObjectRef] = []
        self.members = [self._new_member(index) for index in range(replicas)]

    # Members ----------------------------------------------------------------------------------------------------------

    def _new_member(self, index: int, **history: Any) -> Member:
        incarnation = self._incarnation
        handle = self._spawn(index, incarnation)
        self._incarnation += 1
        return Member(index, incarnation, handle, self._prepare(handle), time.monotonic() + self._start_timeout, **history)

    def _respawn(self, member: Member) -> None:
        """A new actor in the place of one that is gone."""
        self.members[self.members.index(member)] = self._new_member(
            member.index, replaces=True, failed_starts=member.failed_starts)

    def prepare_again(self, prepare: Callable[[Any], Checked]) -> None:
        """Make every member answer further calls before it gets more work (a new adapter is out)."""
        for member in self.members:
            if not all(running.task.settled for running in member.running.values()):  # a call taken over may still be about
                raise FlowGrpoError(f"pool {self.name}: new weights while actor {member.index} works under the old ones")
            if member.handle is None:
                continue  # it rests, and is prepared when it is started
            member.starting = [*member.starting, *prepare(member.handle)]
            member.start_deadline = time.monotonic() + self._start_timeout

    def forgive_deaths(self) -> None:
        """A new step: deaths so far do not count against `max_deaths` any more."""
        self._forgiven = self._lost

    @property
    def _lost(self) -> int:
        return self.counts["deaths"] + self.counts["taken_out"]

    @property
    def all_ready(self) -> bool:
        """No actor is starting, and there are some; those that rest after a start that failed are not waited for."""
        return not any(member.starting for member in self.members) and any(member.ready for member in self.members)

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

    def status(self) -> PoolStatus:
        """The state of the pool now; no call is made for it."""
        ready = [m for m in self.members if m.ready]
        return PoolStatus(
            target=len(self.members), ready=len(ready), starting=len(self.members) - len(ready),
            busy=sum(bool(m.running) for m in ready), queued=len(self._queue),
            counts={event: self.counts[event] for event in EVENTS},
            nodes=dict(Counter(m.node for m in self.members if m.node)))

    # Work -------------------------------------------------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        self._queue.append(task)
        self._queue.sort(key=lambda t: t.order)
        self.pump()

    def submit_again(self, task: Task, *, on_fresh_actor: bool = False) -> None:
        """Submit a task that has failed once more: an actor that has not failed it gets it, if there is one.

        `on_fresh_actor`: if every living actor has failed it, one of them is replaced first (where that is possible).
        """
        task.attempts += 1
        task.kills = task.fill = 0  # it keeps the shape that it had
        task.settled = False
        self.counts["repeated"] += 1
        if on_fresh_actor and self._respawns and not self.has_another(task):
            ready = [member for member in self.members if member.ready]
            if ready:
                self._take_out(min(ready, key=lambda m: (len(m.running), m.index)), f"all actors failed at {task.what}")
        self.submit(task)

    def has_another(self, task: Task) -> bool:
        """Whether an actor is alive that has not failed a task."""
        return any(m.handle is not None and m.incarnation not in task.failed_on for m in self.members)

    def pump(self) -> None:
        """Give queued tasks, in plan order, to actors that are free for them."""
        while (found := match(self._queue, self.members, self.depth, self._max_failures)) is not None:
            position, member = found
            self._start(member, self._next(position))
        for idle in [m for m in trusted(self.members, self._max_failures) if m.ready and not m.running]:
            self._take_over(idle)

    def _next(self, position: int) -> Task:
        """A task of the queue, filled up with those behind it where it allows that."""
        tasks = [self._queue.pop(position)]
        while (tasks[0].fill and position < len(self._queue) and self._queue[position].fill
               and self._queue[position].kind == tasks[0].kind
               and sum(task.size for task in [*tasks, self._queue[position]]) <= tasks[0].fill):
            tasks.append(self._queue.pop(position))
        return tasks[0] if len(tasks) == 1 else tasks[0].join(tasks)

    def _take_over(self, idle: Member) -> None:
        """An idle actor does the call that waits behind another's: a slow actor holds up nothing but the call that it is at.

        The slow one does it as well, later: `ray.cancel` of a call of an actor that runs its calls in order can leave a hole
        in their numbering, at which Ray gives up the actor after 30 s. The answers are equal, the first counts."""
        waiting = [running for m in self.members for running in list(m.running.values())[1:]
                   if not running.moved and idle.incarnation not in running.task.failed_on]
        if waiting:
            running = min(waiting, key=lambda running: running.task.order)
            running.moved = True
            self._start(idle, running.task)

    def _start(self, member: Member, task: Task) -> None:
        refs = getattr(member.handle, task.method).options(num_returns=task.num_returns).remote(*task.args)
        refs = refs if isinstance(refs, list) else [refs]
        # Calls of one actor run one after another: the clock of a queued one starts when it can start.
        earliest = max([time.monotonic(), *(r.deadline for r in member.running.values())])
        member.running[refs[0]] = Running(task, refs, earliest + task.timeout_s)

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
        for member in [m for m in self.members if m.record.own >= self._max_failures]:
            self._take_out(member, f"{counted(member.record.own, 'call')} in a row failed on it and were done by others")
        self.pump()

    def _go_on_starting(self, member: Member) -> None:
        """Take the first answer that a starting actor owes."""
        ref, check = member.starting[0]
        try:
            value = ray.get(ref, timeout=60)
        except RayTaskError as error:
            failure = _start_error(self.name, member, error)
            if isinstance(error.cause, SyncError | ConfigError):
                raise failure from error  # trying again cannot help
            self._cannot_start(member, failure)
            return
        except RayActorError as error:
            if getattr(error, "actor_init_failed", False):
                self._cannot_start(member, _start_error(self.name, member, error))
            else:
                self._died(member, f"while starting: {first_line(error)}")
            return
        except RuntimeEnvSetupError as error:
            self._cannot_start(member, FlowGrpoError(
                f"pool {self.name}: the environment of actor {member.index} could not be made: {setup_reason(error)}"))
            return
        check(value)
        if not member.pid:
            member.pid, member.node, member.node_id = value  # the first answer is `ready`'s
        member.starting.pop(0)
        if not member.starting:
            member.failed_starts, member.was_ready = 0, True

    def _cannot_start(self, member: Member, error: FlowGrpoError) -> None:
        """A first start that fails is the run's failure; a later one may be for a while, and is for its tasks to deal with."""
        if member.was_ready and self._respawns:  # it fails at what it is told between two pieces of work, as new weights
            self._take_out(member, message_of(error))
            return
        alone = not any(m.ready or m.starting for m in self.members if m is not member)
        if self._rest is None or not member.replaces or self._needed and alone:
            raise error
        self.counts["failed_starts"] += 1
        ray.kill(member.handle)
        rest = min(60.0, self._rest * 2**member.failed_starts)
        log.warning("%s; it is tried again in %g s", error, rest)
        self.members[self.members.index(member)] = Member(
            member.index, member.incarnation, None, [], 0.0, replaces=True, failed_starts=member.failed_starts + 1,
            rests_until=time.monotonic() + rest)
        if alone:
            waiting, self._queue = self._queue, []
            for task in waiting:
                self._settle(task, NoActorError(f"no actor of the pool could be started again: {error}"))

    def _finish(self, member: Member, ref: ray.ObjectRef) -> None:
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
        if failure is None:
            member.record.succeeded(running.task.method)
        else:
            running.task.failed_on.add(member.incarnation)
            member.record.failed(running.task)
            if running.task.settled:  # by another, which had it as well
                member.record.done_by_another(running.task)
        self._settle(running.task, failure, value, running.refs[1:])

    def _settle(self, task: Task, failure: Exception | None, value: Any = None, rest: Sequence[ray.ObjectRef] = ()) -> None:
        """Tell how a task ended. Of one that two actors do, the first answer counts, and a failure only if it is the last."""
        if task.settled or failure is not None and self._done_by_another(task):
            return
        task.settled = True
        if failure is None:
            for member in self.members:
                if member.incarnation in task.failed_on:
                    member.record.done_by_another(task)
            task.on_done(value, list(rest))
            return
        task.on_failed(failure)
        if task.settled:  # it was not submitted again: nobody has done it
            for member in self.members:
                member.record.forget(task)

    def _done_by_another(self, task: Task, member: Member | None = None) -> bool:
        return any(running.task is task for m in self.members if m is not member for running in m.running.values())

    @staticmethod
    def _start_clock(member: Member) -> None:
        """The next call of the actor starts now: its deadline counts from here."""
        for running in member.running.values():
            running.deadline = min(running.deadline, time.monotonic() + running.task.timeout_s)
            break

    def _died(self, member: Member, why: str) -> None:
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

    def _salvage(self, member: Member) -> None:
        """Calls that were answered before the actor died are done, though their refs were not looked at yet."""
        for ref, running in list(member.running.items()):
            if ray.wait([ref], timeout=0)[0]:
                try:
                    value = ray.get(ref, timeout=60)
                except RayError:
                    continue
                del member.running[ref]
                self._settle(running.task, None, value, running.refs[1:])

    def _take_out(self, member: Member, why: str) -> None:
        """Replace an actor that is alive and fails; what waits for it is submitted again, and counts as no failure."""
        if not self._respawns:
            log.warning("pool %s: actor %d fails: %s", self.name, member.index, why)
            member.record = FailureRecord()
            return
        self.counts["taken_out"] += 1
        log.warning("pool %s: actor %d is replaced: %s", self.name, member.index, why)
        self._salvage(member)
        ray.kill(member.handle)
        self._replace(member, "failed")

    def _replace(self, member: Member, why: str = "died") -> None:
        if not self._respawns:
            raise FlowGrpoError(f"pool {self.name}: actor {member.index} {why}, and with it a learner rank is lost")
        if self._lost - self._forgiven > self._max_deaths:
            raise FlowGrpoError(f"pool {self.name}: more than {counted(self._max_deaths, 'actor')} died or were "
                                "taken out within one step (pools.max_actor_deaths)")
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

    def _expire(self, member: Member) -> None:
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


def _start_error(pool: str, member: Member, error: RayError) -> FlowGrpoError:
    """What a user has to know where an actor could not start, or take new weights: our own errors without the traceback."""
    if isinstance(getattr(error, "cause", None), FlowGrpoError):
        text = message_of(error.cause)
    else:
        text = str(error)
        # Of errors that are raised from one another the last one is what the code that knows most has to say.
        own = [part.partition("Error: ")[2] for part in _CHAINED.split(text) for part in _OWN.findall(part)]
        text = own[-1].strip() if own else text
    what = "take new weights" if member.was_ready else "start"
    return FlowGrpoError(f"pool {pool}: actor {member.index} could not {what}: {text}")
