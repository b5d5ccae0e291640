"""Errors that a user can act on, and the phrase that names the nearest right choice."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class FlowGrpoError(RuntimeError):
    """A failure that is explained in its message; the command line prints it without a traceback."""


class ConfigError(FlowGrpoError, ValueError):
    """The configuration, a prompt file or another input is wrong."""


class SyncError(FlowGrpoError):
    """A rollout actor does not hold the weights that it was given (invariant: a weight sync is proven)."""


class RatioError(FlowGrpoError):
    """The learner's log-probs of the first update differ from the rollout's: the policies are not the same."""


class ResourceError(FlowGrpoError):
    """The cluster cannot hold the actors that the configuration asks for, or they did not start in time."""


class HubError(ConfigError):
    """The Hugging Face Hub cannot be reached from here, or does not give a model to this account."""


class ResumeError(ConfigError):
    """A run directory cannot be used as asked: its run has other settings or inputs, `run.resume` forbids it, or another
    process is writing it."""


class CheckpointError(FlowGrpoError):
    """A checkpoint is damaged, cannot be read, or is another run's."""


class DeadlineError(FlowGrpoError, TimeoutError):
    """A library's call that leaves the process had no answer by its deadline."""


class Problems:
    """Collects the ConfigErrors of several checks, so that all that is wrong is reported at once."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep a ConfigError that is raised inside."""
        try:
            yield
        except ConfigError as error:
            self.found.append(error)

    def raise_found(self) -> None:
        """Raise the only error that was found, or one ConfigError with the messages of all."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise ConfigError("\n".join(dict.fromkeys(map(str, self.found))))


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 step`, `2 steps`, `0 retries`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"


def nearest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """`; did you mean 'x'?` or the list of choices; an empty string where there are none."""
    choices = [str(choice) for choice in choices]
    if not choices:
        return ""
    if "/" in word and all("/" in choice for choice in choices):  # of paths only the last part says what is alike
        names = {choice.rpartition("/")[2]: choice for choice in choices}
        found = difflib.get_close_matches(word.rpartition("/")[2], names, n=1, cutoff=0.6)
        return f"; did you mean {names[found[0]]}?" if found else ""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    dotted = f"{prefix}." if prefix else ""
    if close:
        return f"; did you mean {dotted}{close[0]}?"
    shown = ", ".join(choices[:30])
    return f"; the choices{' in ' + prefix if prefix else ''} are {shown}"


def message_of(error: BaseException) -> str:
    """An error's message, whatever its own code makes of it; without halves of surrogate pairs, which no file holds."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as unreadable:
        return f"its message cannot be read ({type(unreadable).__name__})"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type where it has none."""
    return (message_of(error).strip().splitlines() or [type(error).__name__])[0]


def described(error: BaseException) -> str:
    """Type and first line of an error, for a message."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def place_of(error: BaseException) -> str:
    """`FILE, line N` where an error was raised: the last place in code of the user's own, where there is one, that is, neither
    in this package nor in Python's own or an installed one."""
    others = {os.path.dirname(os.path.abspath(__file__)), *map(sysconfig.get_path, ("stdlib", "platlib", "purelib"))}
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*(other + os.sep for other in others), "<"))]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"
