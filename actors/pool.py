"""A pool of interchangeable actors: least-loaded dispatch in plan order, deadlines, and replacement of the dead and the sick.

The pool decides who does a task and how often; it never decides what the task is. So nothing here can change a result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors import head, nodes
from actors.dispatch import (
    ActorKilledError,
    FailureRecord,
    Member,
    NoActorError,
    Running,
    Task,
    match,
    serving,
    trusted,
)
from actors.lifecycle import Members
from flowgrpo_ray.errors import FlowGrpoError, counted

log = logging.getLogger(__name__)


class ActorPool(Members):
    """Actors and the tasks that they do.

    Args:
        depth: calls in flight per actor; 2 hides the driver's latency.
        args, kwargs: of `Members`.
    """

    def __init__(self, *args: Any, depth: int = 2, **kwargs: Any) -> None:
        self.depth = depth
        self._queue: list[Task] = []
        self._late: list[ray.ObjectRef] = []
        super().__init__(*args, **kwargs)

    @property
    def idle(self) -> bool:
        """Nothing queued and no answer awaited."""
        return not self._queue and not any(member.busy for member in self.members)

    def queued(self, method: str) -> bool:
        """Whether calls of a method wait for an actor."""
        return any(task.method == method for task in self._queue)

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
            ready = [member for member in serving(self.members) if member.ready]
            if ready:
                self._take_out(min(ready, key=lambda m: (len(m.running), m.index)), f"all actors failed at {task.what}")
        self.submit(task)

    def has_another(self, task: Task) -> bool:
        """Whether an actor is alive that has not failed a task."""
        return any(m.handle is not None and m.incarnation not in task.failed_on for m in serving(self.members))

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
        if len(tasks) == 1:
            return tasks[0]
        assert tasks[0].join is not None
        return tasks[0].join(tasks)

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
        return min([self._remind_at, *deadlines])

    def settle(self, ready: set[ray.ObjectRef]) -> None:
        """Deal with finished calls and with deadlines that have passed, then hand out more work."""
        self.count_time()
        for member in list(self.members):
            if member.starting and member.starting[0][0] in ready:
                self._go_on_starting(member)
            elif member.starting and time.monotonic() > member.start_deadline:
                self._too_late(member)
            elif member.handle is None and time.monotonic() > member.rests_until:
                self._respawn(member)
            for ref in [ref for ref in member.running if ref in ready]:
                if ref in member.running:  # a death settles all of a member's calls at once
                    self._finish(member, ref)
            self._expire(member)
        for member in [m for m in self.members if m.record.own >= self._max_failures]:
            self._take_out(member, f"{counted(member.record.own, 'call')} in a row failed on it and were done by others")
        self._end_drained()
        self._remind()
        self.pump()

    def _finish(self, member: Member, ref: ray.ObjectRef) -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = ray.get(ref, timeout=60)
        except RayActorError as error:
            self._died(member, nodes.why_lost(error, member.node, member.node_id))
            return
        except RayTaskError as error:
            head.check()  # what it needs went with Ray
            failure = error
            if isinstance(error.cause, Exception):
                failure = error.cause
                failure.__cause__ = error  # which has the traceback
        except RayError as error:
            failure = error
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

    def _give_up(self, error: FlowGrpoError) -> None:
        """No actor is left, and none can be started for now."""
        waiting, self._queue = self._queue, []
        for task in waiting:
            self._settle(task, NoActorError(f"no actor of the pool could be started again: {error}"))

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
        self._excused += member.draining
        log.warning("pool %s: actor %d died (%s)", self.name, member.index, why)
        self._salvage(member)
        # Calls run one at a time, so the oldest is the one that can have killed the actor; the others only waited.
        for position, running in enumerate(member.running.values()):
            if position == 0:
                running.task.kills += 1
                running.task.fill = 0  # it is suspect: it waits for its second try by itself
        self._replace(member, f"died ({why})")

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
        self._excused += member.draining
        log.warning("pool %s: actor %d is replaced: %s", self.name, member.index, why)
        self._salvage(member)
        ray.kill(member.handle)
        self._replace(member, f"failed ({why})")

    def _replace(self, member: Member, why: str = "died") -> None:
        if not self._respawns:
            raise FlowGrpoError(f"pool {self.name}: actor {member.index} {why}, and with it a learner rank is lost")
        if not member.draining and self._lost - self._forgiven > self._max_deaths:
            raise FlowGrpoError(f"pool {self.name}: more than {counted(self._max_deaths, 'actor')} died or were "
                                f"taken out within one step (pools.max_actor_deaths); actor {member.index} {why}")
        tasks = [running.task for running in member.running.values()
                 if not running.task.settled and not self._done_by_another(running.task, member)]
        member.running.clear()
        if member.draining:
            self._remove(member)
        else:
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

