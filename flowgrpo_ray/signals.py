"""Signals that end a command: Ctrl-C and SIGTERM.

A handler raises in the main thread, wherever that is; where it is in a destructor or in a callback of a library, Python or the
library drops what was raised, and the command would go on. So a signal is remembered, and loops that wait call `check`.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_received: int | None = None


class Terminated(SystemExit):
    """SIGTERM has come."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


def install() -> None:
    """From now on SIGINT raises KeyboardInterrupt and SIGTERM `Terminated`, and both are remembered. For the main thread."""
    global _received
    _received = None
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)


def check() -> None:
    """Raise for a signal that has come; does nothing where none has."""
    if _received is not None:
        _raise(_received)


def terminated() -> bool:
    """Whether SIGTERM has come."""
    return _received == signal.SIGTERM


def by_signal(error: SystemExit) -> bool:
    """Whether an exit was asked for from outside (by SIGTERM to a command or to a process of Ray), not by the code that ran."""
    return isinstance(error, Terminated) or hasattr(error, "ray_terminate_msg")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    global _received
    _received = number
    _raise(number)


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated()
