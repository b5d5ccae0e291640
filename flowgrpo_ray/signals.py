"""Signals that end a command: Ctrl-C and SIGTERM.

A handler raises in the main thread, wherever that is; where it is in a destructor or in a callback of a library, Python or the
library drops what was raised, and the command would go on. So a signal is remembered, and loops that wait call `check`.
And where the main thread is in native code that does not return, no handler runs at all: a thread
sees that, and ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

DEAF_S = 4.0  # where no handler has run within this after the first signal, the process ends

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_received: int | None = None
_obeyed = False  # what has come is being obeyed
_count = 0
_watchers: list[Callable[[int], None]] = []
_pipe: int | None = None


class Terminated(SystemExit):
    """SIGTERM has come."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class StopRequested(BaseException):
    """A run was stopped by `flowgrpo-ray stop`: a good end, which the message describes."""


def install() -> None:
    """From now on SIGINT raises KeyboardInterrupt and SIGTERM `Terminated`, and both are remembered. For the main thread."""
    global _received, _count
    _received, _count = None, 0
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    if _end_if_deaf not in _watchers:
        watch(_end_if_deaf)


def watch(callback: Callable[[int], None]) -> None:
    """From now on `callback(number)` is called for every signal, in a thread of its own, whatever the
    main thread is at. For the main thread."""
    global _pipe
    _watchers.append(callback)
    if _pipe is None:
        told, _pipe = os.pipe()
        os.set_blocking(_pipe, False)
        # Gets the number of every signal as a byte, at once.
        signal.set_wakeup_fd(_pipe, warn_on_full_buffer=False)
        threading.Thread(target=_pass_on, args=(told,), name="signals", daemon=True).start()


def unwatch(callback: Callable[[int], None]) -> None:
    """Undo `watch`. For the main thread; does nothing where it was not watched."""
    global _pipe
    with suppress(ValueError):
        _watchers.remove(callback)
    if not _watchers and _pipe is not None:
        signal.set_wakeup_fd(-1)
        os.close(_pipe)
        _pipe = None


def _pass_on(told: int) -> None:
    while numbers := os.read(told, 64):
        for number in numbers:
            for callback in list(_watchers):
                threading.Thread(target=callback, args=(number,), daemon=True).start()
    os.close(told)


def _end_if_deaf(number: int) -> None:
    """End the process where no handler has run some seconds after the first signal."""
    if signal.getsignal(number) is not _end:
        return  # somebody else's handler
    deadline = time.monotonic() + DEAF_S
    while _received is None:
        if time.monotonic() >= deadline:
            os.write(2, b"ended in the middle of a call of a library that did not return\n")
            os._exit(128 + number)
        time.sleep(0.05)


def check() -> None:
    """Raise for a signal that has come; does nothing where none has."""
    if _received is not None and not _obeyed:
        _raise(_received)


@contextmanager
def finishing() -> Iterator[None]:
    """Within it, the signals that have come are being obeyed: `check` raises only for a later one."""
    global _obeyed
    _obeyed = True
    try:
        yield
    finally:
        _obeyed = False


def received() -> int | None:
    """The number of the last signal that has come."""
    return _received


def insisted() -> bool:
    """Whether more than one signal has come."""
    return _count > 1


def terminated() -> bool:
    """Whether SIGTERM has come."""
    return _received == signal.SIGTERM


def by_signal(error: SystemExit) -> bool:
    """Whether an exit was asked for from outside (by SIGTERM to a command or to a process of Ray), not by the code that ran."""
    return isinstance(error, Terminated) or hasattr(error, "ray_terminate_msg")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    global _received, _obeyed, _count
    _received, _obeyed, _count = number, False, _count + 1
    _raise(number)


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated()
