"""The nodes of a run: which it uses, and what became of one that was lost, for the first and the last lines of its log."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError

from actors.process import Process
from flowgrpo_ray.errors import counted, first_line, message_of
from flowgrpo_ray.views.status import PoolStatus

log = logging.getLogger(__name__)

_ANSWER_S = 2.0  # a node's raylet takes a connection within this, or does not answer
_ADDRESS = re.compile(r"\bip: (\S+)")
# Why a node has ended, by Ray's number (NodeDeathInfo.Reason in common.proto).
_REASONS = {1: "was shut down", 3: "was preempted", 4: "was drained because it was idle"}
_MEMORY = ("OUT_OF_MEMORY", "memory usage threshold", "low on memory")

_used: dict[str, str] = {}  # addresses of the nodes that the run's actors were on, by Ray's id
_noticed: dict[str, float] = {}  # when a node's end was noticed, seconds since the epoch, by id


def begin() -> None:
    """A run begins, with no node of its own as yet."""
    _used.clear()


def used(process: Process) -> None:
    """An actor of the run is up on this node."""
    if process.node_id:
        _used[process.node_id] = process.node


def cluster() -> str:
    """The cluster in a line: version, address, size."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    total = ray.cluster_resources()
    return (f"Ray {ray.__version__} at {ray.get_runtime_context().gcs_address}: "
            f"{counted(len(alive), 'node')}, CPU {total.get('CPU', 0):g}, GPU {total.get('GPU', 0):g}")


def placed(pools: Mapping[str, PoolStatus]) -> str:
    """Where the actors of each pool are, in a line."""
    parts = [f"{name} " + ", ".join(f"{node} x{count}" for node, count in sorted(pool.nodes.items()))
             for name, pool in pools.items() if pool.nodes]
    return "nodes: " + "; ".join(parts)


def why_lost(error: BaseException, node: str = "", node_id: str = "") -> str:
    """Why an actor is gone or an object lost: its node and the state of that, instead of the text of Ray's call.

    Args:
        error: Ray's.
        node: address of the actor's node, if it ever was up; node_id: Ray's id of it.
    """
    log.debug("Ray says: %s", message_of(error))
    if isinstance(error, ObjectLostError):
        ended = [text for node_id, address in _used.items() if (text := _ended(node_id, address))]
        return f"data of this step were lost: {', '.join(ended) or first_line(error)}"
    said = message_of(error)
    address = node or (match[1] if (match := _ADDRESS.search(said)) else "")
    if isinstance(error, OutOfMemoryError) or any(sign in said for sign in _MEMORY):
        return f"Ray ended its process because node {address or '(unknown)'} was running out of memory"
    if not isinstance(error, RayActorError) or not address:
        return f"{type(error).__name__}: {first_line(error)}"
    return _ended(node_id, address) or (
        f"its process on node {address} crashed or was killed (as the kernel does when memory runs out); the node is alive")


def _ended(node_id: str, address: str) -> str:
    """For example `node 10.0.0.3 has been dead since 12:03:45`; empty for a node that is alive."""
    found = [node for node in ray.nodes() if node["NodeID"] == node_id or not node_id and node["NodeManagerAddress"] == address]
    if any(node["Alive"] and _answers(node) for node in found):
        return ""
    node: dict[str, Any] = next(iter(found), {})
    at = time.strftime("%H:%M:%S", time.localtime(_end_time(node.get("NodeID", node_id))))
    if node.get("Alive"):
        return f"node {address} has not answered since {at}"
    what = _REASONS.get(node.get("DeathReason", 0))
    return f"node {address} {f'{what} at' if what else 'has been dead since'} {at}"


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether something listens where the node's raylet does; Ray needs up to half a minute to see that nothing does."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def _end_time(node_id: str) -> float:
    """When a node ended as Ray's dashboard has it, else when that was first noticed here."""
    noticed = _noticed.setdefault(node_id, time.time())
    with suppress(Exception):  # no dashboard
        from ray.util.state import get_node

        node = get_node(node_id, timeout=3)
        if node is not None and node.end_time_ms:
            return node.end_time_ms / 1000
    return noticed
