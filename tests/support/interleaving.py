"""Every order in which the steps of several programs can happen. A program calls `step()` before each access to what it shares
with the others; between two steps it runs alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

_current = threading.local()


def step() -> None:
    """Wait for one's turn."""
    _current.run.pause(_current.index)


def name() -> int:
    """Index of the program that calls."""
    return _current.index


class _Run:
    def __init__(self, programs: list[Callable[[], Any]]) -> None:
        self._go = [threading.Semaphore(0) for _ in programs]
        self._paused = threading.Semaphore(0)
        self.running = set(range(len(programs)))
        self.outcomes: list[Any] = [None] * len(programs)
        self._threads = [threading.Thread(target=self._work, args=item, daemon=True) for item in enumerate(programs)]
        for thread in self._threads:
            thread.start()
            self._paused.acquire()

    def _work(self, index: int, program: Callable[[], Any]) -> None:
        _current.run, _current.index = self, index
        self.pause(index)
        try:
            self.outcomes[index] = program()
        except Exception as error:
            self.outcomes[index] = error
        self.running.discard(index)
        self._paused.release()

    def pause(self, index: int) -> None:
        self._paused.release()
        self._go[index].acquire()

    def advance(self, index: int) -> None:
        self._go[index].release()
        self._paused.acquire()


def interleavings(make: Callable[[], list[Callable[[], Any]]]) -> Iterator[list[Any]]:
    """What the programs of `make()` return, or raise, in every order of their steps; `make` starts each order afresh."""
    prefix: list[int] = []
    while True:
        run, taken = _Run(make()), []
        while run.running:
            choices = sorted(run.running)
            position = prefix[len(taken)] if len(taken) < len(prefix) else 0
            taken.append((position, len(choices)))
            run.advance(choices[position])
        yield run.outcomes
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        prefix = [position for position, _ in taken[:-1]] + [taken[-1][0] + 1]
