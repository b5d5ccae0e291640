"""One driver at a time: the file `driver.json` in a run directory names the process that writes into it.

On one machine a second driver is refused while the first lives. Across machines nobody can tell a dead driver from a slow
one, so the newer takes over, and the older stops at its next write instead of mixing its rows and checkpoints in.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from contextlib import suppress
from typing import Any

import psutil

from flowgrpo_ray import storage
from flowgrpo_ray.errors import CheckpointError, ConfigError

FILE = "driver.json"


def take(run_dir: str) -> str:
    """Claim the run for this process; returns the claim's id.

    Raises:
        CheckpointError: another living process of this machine writes into the run.
        ConfigError: the folder cannot be written.
    """
    pid, identity = os.getpid(), uuid.uuid4().hex
    claim = {"id": identity, "host": socket.gethostname(), "pid": pid, "started": psutil.Process(pid).create_time()}
    data, uri = json.dumps(claim).encode(), storage.join(run_dir, FILE)
    try:
        local = storage.local_path(uri)
        if local is not None:
            local.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), open(local, "xb") as file:  # of two that start together, one makes the file
                file.write(data)
                return identity
        _check_free(run_dir)
        storage.write_bytes(uri, data)
        return identity
    except OSError as error:
        raise ConfigError(f"run.dir: {storage.display(run_dir)} cannot be written: {error.strerror or error}") from error


def _check_free(run_dir: str) -> None:
    holder = _read(run_dir)
    if holder and holder.get("host") == socket.gethostname() and holder.get("pid") != os.getpid() and _alive(holder):
        raise CheckpointError(f"{storage.display(run_dir)} is being written by process {holder['pid']} of this machine; wait "
                              "for it, stop it, or choose another run.name")


def check_held(run_dir: str, identity: str) -> None:
    """Raise CheckpointError unless the run is still claimed under `identity`."""
    holder = _read(run_dir)
    if holder is None or holder.get("id") != identity:
        who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "somebody who removed its claim"
        raise CheckpointError(f"{storage.display(run_dir)} has been taken over by {who}; this driver stops")


def release(run_dir: str, identity: str) -> None:
    """Give the claim up, if it is still held; a local folder with nothing else in it goes with it."""
    holder = _read(run_dir)
    if holder is None or holder.get("id") != identity:
        return
    storage.delete_file(storage.join(run_dir, FILE))
    local = storage.local_path(run_dir)
    if local is not None:
        with suppress(OSError):  # not empty
            local.rmdir()


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
