"""The actors of a pool: birth, weights, death, and how many there shall be."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError

from actors import nodes
from actors.dispatch import EVENTS, Checked, Member, Task, serving
from actors.environments import setup_reason
from actors.tracebacks import summary
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, ResourceError, SyncError, message_of
from flowgrpo_ray.views.status import PoolStatus

log = logging.getLogger(__name__)

REST_S = 5.0  # before a new actor that could not start is tried again, where the pool has no `rest_s` of its own
REMIND_S = 30.0  # how often the log says that actors wait for room

# How tracebacks of Python tell an error of ours, to the end of its message, and where the next error of a chain begins.
_OWN = re.compile(r"^flowgrpo_ray\.[\w.]+Error: .*", re.DOTALL | re.MULTILINE)
_CHAINED = re.compile(r"\n\n(?:The above exception was the direct cause of the following exception|"
                      r"During handling of the above exception, another exception occurred):\n\n")


class Members:
    """Actors of one kind, `target` of them.

    Args:
        spawn: makes the actor of a member index and incarnation.
        prepare: calls that an actor must answer once it is up, before it gets work, each with a check of the answer that
            raises if it is wrong (a rollout actor loads and proves the current adapter here).
        max_deaths: more deaths than these (actors taken out are counted with them), since the start or the last
            `forgive_deaths`, and the pool gives up. What hangs is not counted: its task fails, and what that means is for the
            task's owner to say.
        max_failures_in_a_row: an actor that has failed so many calls in a row, all of which others then did well, is taken
            out and replaced. While that is open it gets no work, if others are there to do it.
        asks: what one actor asks of the cluster, in words.
        start_hint: ends the error for an actor that was not ready in time.
        rest_s: an actor that replaces another and cannot start is tried again after so many seconds, twice as many each time,
            60 s at most; where no other actor is left, the tasks that waited for it fail with `NoActorError`. None: the first
            such failure is raised, as that of a first start always is.
        needed: the run cannot go on without an actor: where no other one is left, a failed start is raised.
    """

    _queue: list[Task]

    def __init__(
        self, name: str, replicas: int, spawn: Callable[[int, int], Any], *,
        prepare: Callable[[Any], Checked] = lambda handle: [], start_timeout_s: float, max_deaths: int,
        max_failures_in_a_row: int = 3, respawns: bool = True, asks: str = "", start_hint: str = "",
        rest_s: float | None = None, needed: bool = False,
    ) -> None:
        self.name, self.target = name, replicas
        self._spawn, self._prepare = spawn, prepare
        self._start_timeout, self._max_deaths, self._respawns = start_timeout_s, max_deaths, respawns
        self._max_failures, self._asks, self._start_hint = max_failures_in_a_row, asks, start_hint
        self._rest, self._needed = rest_s, needed
        self.counts: Counter[str] = Counter()  # deaths, taken_out, repeated, timeouts, failed_starts, late_answers
        self._excused = 0  # deaths of actors that nothing depended on: new ones that were starting, draining ones
        self._forgiven = 0  # actors lost
        self._incarnation = 0
        self._remind_at = float("inf")
        self._actor_seconds, self._up, self._counted_at = 0.0, 0, time.monotonic()
        self.left: set[str] = set()  # ids of nodes that an actor has left because of `resize`
        self.members = [self._new_member(index) for index in range(replicas)]

    # To be done with the tasks of an actor ----------------------------------------------------------------------------

    def _died(self, member: Member, why: str) -> None:
        raise NotImplementedError

    def _take_out(self, member: Member, why: str) -> None:
        raise NotImplementedError

    def _give_up(self, error: FlowGrpoError) -> None:
        raise NotImplementedError

    def pump(self) -> None:
        raise NotImplementedError

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def all_ready(self) -> bool:
        """Every actor of the start is ready, and every one that was at work has its new weights; there are some.

        One that replaces another or is new holds up nobody: it is given the weights that are current when it is up, and
        joins then.
        """
        waited_for = (m for m in self.members if not m.draining and (m.was_ready or not (m.replaces or m.newcomer)))
        return not any(m.starting for m in waited_for) and any(m.ready for m in serving(self.members))

    @property
    def needs_room(self) -> bool:
        """No actor could work yet, or any more, and one that shall is not up."""
        actors = [m for m in serving(self.members) if m.handle is not None]
        return not any(m.was_ready for m in actors) and any(not m.up for m in actors)

    @property
    def alive(self) -> int:
        """Actors that are up."""
        return sum(m.handle is not None and m.up for m in self.members)

    def activity(self) -> list[str]:
        """What each actor is doing, for the live view."""
        return [self._doing(member) for member in self.members]

    @staticmethod
    def _doing(member: Member) -> str:
        if member.newcomer and not member.up and not member.failed_starts:
            return "pending"
        if member.starting:
            return "starting"
        if not member.ready:
            return "cannot start"
        what = next((running.task.what for running in member.running.values()), "idle")
        return f"draining: {what}" if member.draining else what

    def status(self) -> PoolStatus:
        """The state of the pool now; no call is made for it."""
        draining = sum(m.draining for m in self.members)
        ready = [m for m in self.members if m.ready and not m.draining]
        return PoolStatus(
            target=self.target, ready=len(ready), starting=len(self.members) - len(ready) - draining,
            busy=sum(bool(m.running) for m in ready), draining=draining, queued=len(self._queue),
            counts={event: self.counts[event] for event in EVENTS},
            nodes=dict(Counter(m.node for m in self.members if m.up)))

    def count_time(self) -> float:
        """Seconds that actors were up, summed over them, since `restart_clock`."""
        now = time.monotonic()
        self._actor_seconds += self._up * (now - self._counted_at)
        self._counted_at, self._up = now, self.alive
        return self._actor_seconds

    def restart_clock(self) -> None:
        self.count_time()
        self._actor_seconds = 0.0

    def forgive_deaths(self) -> None:
        """A new step: deaths so far do not count against `max_deaths` any more."""
        self._forgiven = self._lost

    @property
    def _lost(self) -> int:
        return self.counts["deaths"] - self._excused + self.counts["taken_out"]

    # Starts and weights -----------------------------------------------------------------------------------------------

    def _new_member(self, index: int, **history: Any) -> Member:
        incarnation = self._incarnation
        handle = self._spawn(index, incarnation)
        self._incarnation += 1
        starting = [(handle.ready.remote(), lambda process: None)]
        deadline = float("inf") if history.get("newcomer") else time.monotonic() + self._start_timeout
        return Member(index, incarnation, handle, starting, deadline, **history)

    def _respawn(self, member: Member) -> None:
        """A new actor in the place of one that is gone."""
        self.members[self.members.index(member)] = self._new_member(
            member.index, replaces=not member.newcomer, newcomer=member.newcomer, failed_starts=member.failed_starts)

    def prepare_again(self, prepare: Callable[[Any], Checked]) -> None:
        """Make every member answer further calls before it gets more work (a new adapter is out)."""
        for member in self.members:
            if member.busy:
                raise FlowGrpoError(f"pool {self.name}: new weights while actor {member.index} works under the old ones")
            if member.up:  # others get what is current then: a call that waits for an actor would keep its weights alive
                member.starting = [*member.starting, *prepare(member.handle)]
                if member.was_ready:
                    member.start_deadline = time.monotonic() + self._start_timeout

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
            elif member.newcomer:
                self.counts["deaths"] += 1
                self._excused += 1
                self._cannot_start(member, FlowGrpoError(
                    f"pool {self.name}: new actor {member.index} died while starting: "
                    f"{nodes.why_lost(error, member.node, member.node_id)}"))
            else:
                self._died(member, f"while starting: {nodes.why_lost(error, member.node, member.node_id)}")
            return
        except RuntimeEnvSetupError as error:
            self._cannot_start(member, FlowGrpoError(
                f"pool {self.name}: the environment of actor {member.index} could not be made: {setup_reason(error)}"))
            return
        check(value)
        member.starting.pop(0)
        if not member.up:  # the first answer is `ready`'s: now it is given what is current
            member.pid, member.node, member.node_id = value
            nodes.used(value)
            member.starting += self._prepare(member.handle)
            if member.newcomer:
                member.start_deadline = time.monotonic() + self._start_timeout
        if not member.starting:
            member.failed_starts, member.was_ready, member.newcomer = 0, True, False

    def _too_late(self, member: Member) -> None:
        self._cannot_start(member, ResourceError(
            f"pool {self.name}: actor {member.index} was not ready within {self._start_timeout:g} s "
            f"(pools.start_timeout_s): it waits for resources, or is still loading; free now, over all nodes: "
            f"{_free_now()}{self._start_hint}"))

    def _cannot_start(self, member: Member, error: FlowGrpoError) -> None:
        """A first start that fails is the run's failure; a later one may be for a while, and is for its tasks to deal with.
        The failure of one that is new because of `resize` is its own."""
        if member.was_ready and self._respawns:  # it fails at what it is told between two pieces of work, as new weights
            self._take_out(member, message_of(error))
            return
        alone = not member.newcomer and not any(m.ready or m.starting for m in serving(self.members) if m is not member)
        if not member.newcomer and (self._rest is None or not member.replaces or self._needed and alone):
            raise error
        self.counts["failed_starts"] += 1
        ray.kill(member.handle)
        rest = min(60.0, (self._rest or REST_S) * 2**member.failed_starts)
        log.warning("%s; it is tried again in %g s", error, rest)
        self.members[self.members.index(member)] = Member(
            member.index, member.incarnation, None, [], 0.0, replaces=member.replaces, newcomer=member.newcomer,
            failed_starts=member.failed_starts + 1, rests_until=time.monotonic() + rest)
        if alone:
            self._give_up(error)

    # The number of actors ---------------------------------------------------------------------------------------------

    def resize(self, target: int) -> None:
        """Have `target` actors from now on, through deaths too.

        New actors are made at once, by the path of every start. Until one is up it is demand of the cluster that others need
        not wait for: it has no deadline, and nothing fails with it. Fewer actors: those go first that are not ready yet, new
        ones before others, then those with the highest index. One that works is given nothing more, and ends with its last
        call; what waited goes to the others.

        Raises:
            FlowGrpoError: the pool's actors are not its own to make.
        """
        if not self._respawns:
            raise FlowGrpoError(f"pool {self.name} cannot be resized")
        self.count_time()
        self.target = target
        staying = [m for m in self.members if not m.draining]
        staying.sort(key=lambda m: (m.was_ready, not m.newcomer, m.handle is not None, -m.index))
        for member in staying[: max(0, len(staying) - target)]:
            self._retire(member)
        missing = target - len(staying)
        for member in self.members:
            if missing > 0 and member.draining:  # it is busy, and so holds the newest weights
                member.draining = False
                missing -= 1
        taken = {m.index for m in self.members}
        free = (index for index in range(len(taken) + max(0, missing)) if index not in taken)
        for _ in range(missing):
            self.members.append(self._new_member(next(free), newcomer=True))
            self._remind_at = time.monotonic() + REMIND_S
        self.members.sort(key=lambda m: m.index)
        self.count_time()
        self.pump()

    def _retire(self, member: Member) -> None:
        if member.busy:
            member.draining = True
        else:
            self._end(member)

    def _end(self, member: Member) -> None:
        """An actor that is no longer wanted, and has nothing left to do."""
        if member.handle is not None:
            ray.kill(member.handle)
        self._remove(member)

    def _remove(self, member: Member) -> None:
        self.members.remove(member)
        if member.up:
            self.left.add(member.node_id)
        log.info("pool %s: actor %d has ended, %d are left of a target of %d", self.name, member.index,
                 len(self.members), self.target)

    def _end_drained(self) -> None:
        for member in [m for m in self.members if m.draining and not m.busy]:
            self._end(member)

    def hold_newcomers(self, hold: bool) -> None:
        """Let new actors that are not up stand back, or be made again: others need their room first."""
        for member in self.members:
            if member.newcomer and not member.up and hold and member.handle is not None:
                ray.kill(member.handle)
                member.handle, member.starting, member.rests_until = None, [], float("inf")
            elif member.handle is None and not hold and member.rests_until == float("inf"):
                member.rests_until = 0.0

    def _remind(self) -> None:
        """Say which actors are not up yet, new ones and those that replace others: nothing else would."""
        waiting = [m for m in self.members if not m.up and (m.newcomer or m.replaces and m.handle is not None)]
        if not waiting:
            self._remind_at = float("inf")
        elif self._remind_at == float("inf"):
            self._remind_at = time.monotonic() + REMIND_S
        elif time.monotonic() >= self._remind_at:
            self._remind_at = time.monotonic() + REMIND_S
            log.warning("pool %s: %d of %d actors are not up: they wait for resources%s, or load; free now, over all nodes: "
                        "%s; %s", self.name, len(waiting), self.target, self._asks and f" (each asks for {self._asks})",
                        _free_now(), "the run goes on with the others" if self.alive else
                        f"the run waits for one, up to {self._start_timeout:g} s (pools.start_timeout_s)")


def _free_now() -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    return ", ".join(f"{kind} {free.get(kind, 0.0):g} of {total.get(kind, 0.0):g}" for kind in ("CPU", "GPU"))


def _start_error(pool: str, member: Member, error: RayError) -> FlowGrpoError:
    """What a user has to know where an actor could not start, or take new weights: our own errors without the traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, FlowGrpoError):
        text = message_of(cause)
    else:
        text = str(error)
        # Of errors that are raised from one another the last one is what the code that knows most has to say.
        own = [part.partition("Error: ")[2] for part in _CHAINED.split(text) for part in _OWN.findall(part)]
        text = own[-1].strip() if own else summary(error)
    what = "take new weights" if member.was_ready else "start"
    return FlowGrpoError(f"pool {pool}: actor {member.index} could not {what}: {text}")
