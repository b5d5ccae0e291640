"""Exceptions of actors: a line for the user, and the traceback for a developer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ray.exceptions import RayError, RayTaskError, UnserializableException

from flowgrpo_ray.errors import FlowGrpoError, described, message_of

log = logging.getLogger(__name__)

FAILED = (RayTaskError, UnserializableException)  # an exception of a call; the other is one that cannot be pickled

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3[\d.]*/")


def summary(error: BaseException) -> str:
    """What was raised in an actor, and where: `ValueError: no such word (/code/words.py, line 7)`.

    Args:
        error: what Ray raises for a call that failed or an actor whose constructor did, or the cause of it.
    """
    if not isinstance(error, RayError):
        if isinstance(error, FlowGrpoError) or not isinstance(error.__cause__, RayError):
            return described(error)
        error = error.__cause__
    text = _plain(error)
    log.debug("%s", text)
    frames = list(_FRAME.finditer(text))
    raised = described(getattr(error, "cause", None) or error)
    if not frames:
        return raised
    if not isinstance(error, RayTaskError):  # what was raised is there as text alone
        after = text[frames[-1].end():].splitlines()[1:]
        raised = next((line for line in after if line[:1].strip()), raised)  # lines of code are indented
    place = next((frame for frame in reversed(frames) if not _LIBRARY.search(frame[1])), frames[-1])
    return f"{raised} ({place[1]}, line {place[2]})"


@contextmanager
def kept(keep: Callable[[str], str | None] = lambda text: None) -> Iterator[None]:
    """An error that ends a run inside gets the place of its traceback, if it is due to an exception
    of an actor that explains nothing.

    Args:
        keep: writes a text and returns where; None if there is no place, and then the text goes to the log.
    """
    try:
        yield
    except FlowGrpoError as error:
        raised = _unexplained(error)
        if raised is None:
            raise
        place = None
        with suppress(OSError, FlowGrpoError):  # a full disk, a store that is gone
            place = keep(f"{error}\n\n{_plain(raised)}\n")
        if place is None:
            log.error("%s", _plain(raised))
            raise
        raise type(error)(f"{error}. Its traceback is in {place}") from error


def _unexplained(error: FlowGrpoError) -> RayError | None:
    """The exception of an actor that an error was raised for, if it has no other words for it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RayError) and (isinstance(seen, FAILED) or getattr(seen, "actor_init_failed", False)):
            return seen if summary(seen) in str(error) else None
        seen = seen.__cause__ or seen.__context__
    return None


def _plain(error: RayError) -> str:
    return _COLOURS.sub("", message_of(error)).strip()
