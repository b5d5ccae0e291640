"""One driver at a time: the file `driver.json` in a run directory names the process that writes into it.

On one machine a second driver is refused while the first lives. Across machines nobody can tell a dead driver from a slow
one, so the newer takes over, and the older stops at its next write instead of mixing its rows and checkpoints in.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from typing import Any

import psutil

from flowgrpo_ray import storage
from flowgrpo_ray.errors import CheckpointError

FILE = "driver.json"


def check_free(run_dir: str) -> None:
    """Raise CheckpointError where a living process of this machine, another than this one, writes into the run."""
    holder = _read(run_dir)
    if holder and holder.get("host") == socket.gethostname() and holder.get("pid") != os.getpid() and _alive(holder):
        raise CheckpointError(f"{storage.display(run_dir)} is being written by process {holder['pid']} of this machine; wait "
                              "for it, stop it, or choose another run.name")


def take(run_dir: str) -> str:
    """Claim the run for this process; returns the claim's id."""
    pid, identity = os.getpid(), uuid.uuid4().hex
    claim = {"id": identity, "host": socket.gethostname(), "pid": pid, "started": psutil.Process(pid).create_time()}
    storage.write_bytes(storage.join(run_dir, FILE), json.dumps(claim).encode())
    return identity


def check_held(run_dir: str, identity: str) -> None:
    """Raise CheckpointError unless the run is still claimed under `identity`."""
    holder = _read(run_dir)
    if holder is None or holder.get("id") != identity:
        who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "somebody who removed its claim"
        raise CheckpointError(f"{storage.display(run_dir)} has been taken over by {who}; this driver stops")


def release(run_dir: str) -> None:
    """Give the claim up at the end of the run."""
    storage.delete_file(storage.join(run_dir, FILE))


def _read(run_dir: str) -> dict[str, Any] | None:
    uri = storage.join(run_dir, FILE)
    if storage.size(uri) is None:
        return None
    try:
        holder = json.loads(storage.read_bytes(uri))
        return holder if isinstance(holder, dict) else {}
    except ValueError:
        return {}


def _alive(holder: dict[str, Any]) -> bool:
    """The same process, not a later one with its number."""
    try:
        return abs(psutil.Process(holder["pid"]).create_time() - holder["started"]) < 1
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
