"""What an actor says of itself. Imports only the standard library and Ray, as reward actors may live in other environments."""

from __future__ import annotations

import os
from typing import NamedTuple

import ray


class Process(NamedTuple):
    """An actor's first answer, once its constructor is through."""

    pid: int
    node: str  # address of its node
    node_id: str = ""  # Ray's

    @classmethod
    def here(cls) -> Process:
        """The process that asks, an actor's."""
        return cls(os.getpid(), ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())


class Shown:
    """An actor that shows what it does, and at which version of the weights.

    Ray reads `repr` of an actor once, when its constructor is through: that is what the table of actors and the prefix of its
    log lines show for good, so it begins with what the actor is for. During a call the title of the process is `repr` as it
    is then (dashboard, `ps`, `top`); Ray puts its own back when the call ends. Names of calls would do the same and are left
    alone: each is a label of Ray's own metrics, for ever.
    """

    role = ""  # "samples"
    _doing = ""

    def shows(self, doing: str) -> None:
        """Say what is done from now on, for example "samples at version 3"."""
        self._doing = doing
        set_title(repr(self))

    def __repr__(self) -> str:
        name = ray.get_runtime_context().get_actor_name() if _in_actor() else None
        return f"{name or type(self).__name__} {self._doing or self.role}".rstrip()


def set_title(text: str) -> None:
    """The title of this process, if it is an actor's (dashboard, `ps`, `top`)."""
    if _in_actor():
        ray._raylet.setproctitle(f"ray::{text}")  # type: ignore[attr-defined]


def _in_actor() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
