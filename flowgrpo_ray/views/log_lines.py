"""Lines of a log that no terminal shows: each carries the time, the step of the run, and a text.

    2026-12-02 12:03:45  step 3/30  ocr 0.4123  approx kl 1.2e-06  clip 0.031  images/s 12.5  30.0 s
    2026-12-02 12:03:52  step 4/30  WARNING pool rollout: actor 1 died

What a run says, the rows of its steps, log records and the error that ends it go the same way. In a terminal, where a live view
shows time and step, and for commands that print a result, text stays as it is.
"""

from __future__ import annotations

import logging
import time
from typing import TextIO

_OWN = ("flowgrpo_ray", "actors")  # loggers whose name tells a reader nothing
_on = False
_step = ""


def begin() -> None:
    """From now on what this process says is a log."""
    global _on, _step
    _on, _step = True, ""


def end() -> None:
    """Undo `begin`."""
    global _on, _step
    _on, _step = False, ""


def on() -> bool:
    """Whether what this process says is a log."""
    return _on


def at_step(step: int, steps: int) -> None:
    """The step in progress, from 1, of how many."""
    global _step
    _step = f"step {step:>{len(str(steps))}}/{steps}"


def marked(text: str, *, step: bool = True) -> str:
    """`text`; in a log each of its lines behind the time and, with `step`, the step in progress."""
    if not _on:
        return text
    parts = [time.strftime("%Y-%m-%d %H:%M:%S"), *([_step] if step and _step else [])]
    return "\n".join("  ".join([*parts, line]) for line in text.splitlines() or [""])


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = "" if record.name.partition(".")[0] in _OWN else f" {record.name}:"
        return marked(f"{record.levelname}{name} {super().format(record)}")


def handler(stream: TextIO | None = None) -> logging.Handler:
    """A handler of log records that writes such lines, to standard error unless another stream is given."""
    made = logging.StreamHandler(stream)
    made.setFormatter(_Formatter("%(message)s"))
    return made
