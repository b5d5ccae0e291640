"""Waiting for the events of pools: answers, deadlines, deaths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import ray

from actors import head
from actors.pool import ActorPool
from flowgrpo_ray import signals
from flowgrpo_ray.errors import FlowGrpoError


def wait_for_events(
    pools: list[ActorPool], others: list[ray.ObjectRef], what: str, *, longest_s: float, commands: Sequence[ray.ObjectRef] = ()
) -> set[ray.ObjectRef]:
    """Block until a call of the pools or of `others` is finished, or the next deadline has passed.

    `commands` end the wait too, but nothing in flight depends on them.

    Raises:
        FlowGrpoError: nothing is in flight (a wait that could never end).
    """
    signals.check()
    head.check()
    refs = [ref for pool in pools for ref in pool.waiting_for()] + others
    deadline = min((pool.next_deadline() for pool in pools), default=float("inf"))
    if not refs and deadline == float("inf"):
        raise FlowGrpoError(f"waiting for {what}, but nothing is in flight")
    timeout = max(0.01, min(longest_s, deadline - time.monotonic()))
    refs += commands
    if not refs:
        time.sleep(timeout)
        return set()
    ready, rest = ray.wait(refs, num_returns=1, timeout=timeout)
    if ready and rest:
        more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
        ready += more
    return set(ready)


def drive(pools: list[ActorPool], done: Callable[[], bool], what: str) -> None:
    """Handle the events of pools that nothing else works with, until `done()`."""
    while not done():
        ready = wait_for_events(pools, [], what, longest_s=0.2)
        for pool in pools:
            pool.settle(ready)
