"""The control actor of a run, and the driver's side of it.

Clients (`flowgrpo-ray status`, `scale`, `checkpoint`, `stop`) call the actor; the driver pushes its status to it and takes
their commands from it, in its own waits. The driver never waits for the actor: one that has died, or has not answered for a
while, is made again, and a command that was on its way is asked again by its client, under the same id.

A reply is `{"text": str, "code": int, "final": bool}`; `code` is the exit status of the command. A command that takes a while
has two: what will happen, and what has happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.process import set_title
from flowgrpo_ray.errors import first_line
from flowgrpo_ray.views.status import CONTROL_NAMESPACE, CONTROL_PREFIX

log = logging.getLogger(__name__)

Reply = dict[str, Any]

HUNG_S = 30.0  # without an answer to a status, and the actor is made again
LONGEST_REST_S = 30.0  # between two attempts to make it
LEAVING_S = 5.0  # that the end of a run waits for clients to hear of it
_POLL_S = 0.1
_TITLE_S = 0.1  # after a call


class ControlActor:
    """Holds the newest status of a run, and passes commands and replies on. All of it runs in one event loop.

    In Ray's dashboard its `repr` gives the run and its directory, and the title of its process the step.
    """

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status, self._pushed = dict(status), time.monotonic()
        self._commands: list[dict[str, Any]] = []
        self._replies: dict[str, list[Reply]] = {}
        self._clients: set[str] = set()  # ids of those that have not said goodbye
        self._ended = False
        self._changed = asyncio.Condition()

    async def push(self, status: Mapping[str, Any]) -> None:
        """Take the driver's status."""
        self._status, self._pushed = dict(status), time.monotonic()
        # a call that ends puts Ray's own title back
        asyncio.get_running_loop().call_later(_TITLE_S, self._show)

    async def status(self) -> tuple[dict[str, Any], float]:
        """The newest status, and how many seconds ago the driver pushed it."""
        return self._status, time.monotonic() - self._pushed

    async def take(self) -> list[dict[str, Any]]:
        """For the driver: the next commands, when there are any."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._commands)
            taken, self._commands = self._commands, []
            return taken

    async def answer(self, id: str, replies: list[Reply]) -> None:
        """For the driver: all replies to a command so far."""
        async with self._changed:
            self._replies[id] = replies
            self._changed.notify_all()

    async def ask(self, id: str, command: str, args: Mapping[str, Any], number: int = 0) -> Reply:
        """For clients: the reply of this number to a command, when it is there. Asking again does not repeat the command.

        A client that has heard all it wants says `goodbye`: between two replies it does not wait here.
        """
        async with self._changed:
            self._clients.add(id)
            if id not in self._replies:
                self._replies[id] = []
                self._commands.append({"id": id, "command": command, "args": dict(args)})
                self._changed.notify_all()
            await self._changed.wait_for(lambda: len(self._replies[id]) > number)
            return self._replies[id][number]

    async def ended(self, id: str) -> dict[str, Any]:
        """For clients: the last status of the run, when it has ended; then `goodbye`."""
        async with self._changed:
            self._clients.add(id)
            await self._changed.wait_for(lambda: self._ended)
            return self._status

    async def goodbye(self, id: str) -> None:
        """For clients: everything that this one waited for has reached it."""
        async with self._changed:
            self._clients.discard(id)
            self._changed.notify_all()

    async def close(self, status: Mapping[str, Any]) -> None:
        """The run has ended; returns when all clients have heard of it."""
        async with self._changed:
            self._status, self._ended = dict(status), True
            self._changed.notify_all()
            await self._changed.wait_for(lambda: not self._clients)

    def _show(self) -> None:
        set_title("{run} step {step}/{steps} {phase}".format_map(self._status))

    def __repr__(self) -> str:
        return "{run} in {run_dir}".format_map(self._status)


@dataclass
class Request:
    """A command of a client; its replies are kept for a control actor that is made again."""

    id: str
    command: str
    args: Mapping[str, Any]
    replies: list[Reply] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return any(reply["final"] for reply in self.replies)


class Control:
    """The driver's side.

    Args:
        run_id: of the run, names the actor.
        status: the state of the run as plain data.
        obey: called with each new command; replies with `reply`, then or later. What it raises ends the run.
    """

    def __init__(self, run_id: str, status: Callable[[], dict[str, Any]], obey: Callable[[Request], None]) -> None:
        self._name, self._status, self._obey = CONTROL_PREFIX + run_id, status, obey
        self._requests: dict[str, Request] = {}
        self._actor: Any = None
        self._take: ray.ObjectRef | None = None
        self._calls: dict[ray.ObjectRef, float] = {}  # that the actor has not answered yet, and since when
        self._failures, self._next_start, self._next_poll = 0, 0.0, 0.0

    def refs(self) -> list[ray.ObjectRef]:
        """What the driver's waits wait for as well: the next commands."""
        return [self._take] if self._take is not None else []

    def settle(self, ready: Iterable[ray.ObjectRef] = ()) -> None:
        """Take commands that have come, and make the actor again if it is gone. To be called often, in every wait."""
        now = time.monotonic()
        if self._actor is None:
            if now >= self._next_start:
                self._start()
            return
        if self._take not in set(ready) and now < self._next_poll:
            return
        self._next_poll = now + _POLL_S
        waiting = [self._take, *self._calls]
        try:
            for ref in ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]:
                if ref == self._take:
                    commands = ray.get(ref, timeout=10)
                    self._take = self._actor.take.remote()
                    self._received(commands)
                else:
                    ray.get(ref, timeout=10)
                    del self._calls[ref]
                    self._failures = 0
        except RayError as error:
            self._lost(first_line(error))
            return
        if self._calls and now - min(self._calls.values()) > HUNG_S:
            ray.kill(self._actor)
            self._lost(f"it has not answered for {HUNG_S:g} s")

    def push(self, status: Mapping[str, Any]) -> None:
        """Give the actor a status, if it has taken the last one."""
        if self._actor is not None and not self._calls:
            self._call("push", status)

    def reply(self, request: Request, text: str, code: int = 0, *, final: bool = True) -> None:
        """Answer a command."""
        request.replies.append({"text": text, "code": code, "final": final})
        if self._actor is not None:
            self._call("answer", request.id, request.replies)

    def close(self, text: str, code: int, status: Mapping[str, Any]) -> None:
        """The run ends: commands without a final reply get this one, and the actor ends too."""
        for request in self._requests.values():
            if not request.done:
                self.reply(request, text, code)
        if self._actor is None:
            return
        with suppress(RayError):
            ray.wait([self._actor.close.remote(status)], timeout=LEAVING_S)
        ray.kill(self._actor)
        self._actor = None

    def _start(self) -> None:
        """Make the actor. Its name is taken while one that died, or another driver of the run that ends, has it."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        try:
            self._actor = ray.remote(ControlActor).options(
                name=self._name, namespace=CONTROL_NAMESPACE, num_cpus=0, max_restarts=0, max_concurrency=1000,
                scheduling_strategy=here).remote(self._status())
            self._take = self._actor.take.remote()
        except (RayError, ValueError) as error:
            self._lost(first_line(error), logging.DEBUG)

    def _call(self, method: str, *args: Any) -> None:
        self._calls[getattr(self._actor, method).remote(*args)] = time.monotonic()

    def _received(self, commands: list[dict[str, Any]]) -> None:
        new = [Request(**command) for command in commands if command["id"] not in self._requests]
        for command in commands:
            if (known := self._requests.get(command["id"])) is not None:  # asked again: the actor that took it died
                self._call("answer", known.id, known.replies)
        self._requests.update({request.id: request for request in new})
        for request in new:
            self._obey(request)

    def _lost(self, why: str, level: int = logging.WARNING) -> None:
        rest = min(LONGEST_REST_S, 2.0**self._failures - 1)
        self._failures += 1
        log.log(level, "the control actor is gone (%s); it is made again%s", why, f" in {rest:g} s" if rest else "")
        self._actor = self._take = None
        self._calls.clear()
        self._next_start = time.monotonic() + rest


class NoControl:
    """Stands where no command can come: an evaluation by itself."""

    def refs(self) -> list[ray.ObjectRef]:
        return []

    def settle(self, ready: Iterable[ray.ObjectRef] = ()) -> None: ...

    def push(self, status: Mapping[str, Any]) -> None: ...

    def reply(self, request: Request, text: str, code: int = 0, *, final: bool = True) -> None: ...

    def close(self, text: str, code: int, status: Mapping[str, Any]) -> None: ...
