"""Where an actor runs. Imports only the standard library and Ray: reward actors use it in environments of their own."""

from __future__ import annotations

import os
from typing import NamedTuple

import ray


class Process(NamedTuple):
    """An actor's first answer, once its constructor is through."""

    pid: int
    node: str  # address of its node

    @classmethod
    def here(cls) -> Process:
        """The process that asks, an actor's."""
        return cls(os.getpid(), ray.util.get_node_ip_address())
