"""Deadlines for calls of libraries that leave the process: Ray's connect, object stores, the hub.

Such a call may block for minutes in native code, where the main thread runs no signal handler.
`bounded` makes it in a daemon thread; the calling thread waits for it, logs what it waits for, and
leaves when the deadline has passed or a signal has come. A thread that was left behind cannot be
ended: `abandoned` says that there is one, and the command then ends without waiting for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from flowgrpo_ray import signals
from flowgrpo_ray.errors import DeadlineError

if TYPE_CHECKING:
    from flowgrpo_ray.config import Config

log = logging.getLogger(__name__)

T = TypeVar("T")

SAY_AFTER_S, SAY_EVERY_S = 10.0, 30.0
LEAVING_S = 3.0  # what a call may take after a signal, or beside one without an answer
_POLL_S = 0.5

_abandoned: list[tuple[str, threading.Event]] = []


@dataclass
class Limits:
    """Deadlines in seconds of this process; the configuration sets them (`set_limits`)."""

    storage: float = 60.0
    hub: float = 600.0


limits = Limits()


def set_limits(config: Config) -> None:
    """Take the deadlines of a configuration for this process."""
    limits.storage, limits.hub = config.run.storage_timeout_s, config.run.hub_timeout_s


class Progress:
    """A call that goes on is not late: the deadline counts from the last `made`."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def made(self) -> None:
        self.at = time.monotonic()


def bounded(
    call: Callable[[], T], what: str, timeout_s: float, *, setting: str,
    progress: Progress | None = None,
) -> T:
    """`call()`, made in a thread of its own.

    Args:
        what: what is waited for, as in "waiting for ...".
        timeout_s: seconds from the start, or from the last progress.
        setting: key of the configuration that holds the deadline, for the message.

    Raises:
        DeadlineError: there was no answer in time; the call may still be going on.
        KeyboardInterrupt, signals.Terminated: a signal came meanwhile.
        Whatever `call` raises.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []
    ended = threading.Event()  # Thread.join may take a thread for ended when a signal interrupts it

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)
        ended.set()

    progress, before = progress or Progress(), signals.received()
    hanging, leaving = what in abandoned(), before is not None
    if hanging and leaving:
        raise DeadlineError(f"no answer from {what} as yet, and the command ends")
    if hanging or leaving:
        timeout_s = min(timeout_s, LEAVING_S)
    on_main = threading.current_thread() is threading.main_thread()
    started = time.monotonic()
    say_at = started + SAY_AFTER_S
    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        while not ended.wait(min(_POLL_S, timeout_s)):
            if on_main and signals.received() != before:
                signals.check()  # the handler's exception was swallowed
            now = time.monotonic()
            if now - progress.at >= timeout_s:
                raise DeadlineError(
                    f"no answer from {what} within {round(timeout_s, 1):g} s ({setting})")
            if now >= say_at:
                log.warning("waiting for %s, since %.0f s, for up to %g s (%s)", what,
                            now - started, round(timeout_s, 1), setting)
                say_at = now + SAY_EVERY_S
    finally:
        if not ended.is_set():
            _abandoned.append((what, ended))
    if failure:
        raise failure[0]
    return outcome[0]


def abandoned() -> list[str]:
    """What is still going on of the calls that were left behind."""
    _abandoned[:] = [(what, ended) for what, ended in _abandoned if not ended.is_set()]
    return [what for what, _ in _abandoned]


def distrust(what: str) -> None:
    """Name a library that is in an unknown state after a failure: the command will end without its exit
    handlers."""
    _abandoned.append((what, threading.Event()))
