"""From the command to the first image: how long it takes, and what makes it shorter.

The driver imports neither torch nor diffusers: it moves refs. Actors import them in their constructors, inside `loading`.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_reached: set[str] = set()


def reached(what: str) -> None:
    """Log how long after the start of this process `what` was reached, at level debug; only the first time counts."""
    if what not in _reached and log.isEnabledFor(logging.DEBUG):
        import psutil  # here: a reward's own environment need not have it

        _reached.add(what)
        log.debug("%s: %.2f s", what, time.time() - psutil.Process().create_time())


@contextmanager
def loading() -> Iterator[None]:
    """Large libraries are imported and a model is loaded inside: without looking for cycles in what is all kept, which would
    take a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
