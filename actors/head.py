"""Ray's processes, where this process has started them: whether they are still there.

A signal to a whole process group (from `timeout`, or a job system) ends Ray's own processes together with the driver. Whatever
the driver asks of Ray then waits for a head that does not come back, and when the raylet has ended (some seconds later) Ray's
library ends the driver too, without a word. So the driver looks first, and makes haste.
"""

from __future__ import annotations

import atexit
import time

import psutil
import ray

_processes: list[psutil.Process] = []  # the head's: gcs_server, raylet, the log monitor and the like


def start(**options: object) -> None:
    """`ray.init` on this machine, with a head of its own."""
    before = {child.pid for child in psutil.Process().children()}
    ray.init(address="local", **options)
    _processes[:] = [child for child in psutil.Process().children() if child.pid not in before]


def gone(wait_s: float = 0.0) -> bool:
    """Whether this process has started Ray and some of Ray's processes have ended; waits up to `wait_s` for that to happen."""
    deadline = time.monotonic() + wait_s
    while _processes:
        if not all(map(_alive, _processes)):
            return True
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return False


def shut_down() -> None:
    """End the connection, and Ray where this process has started it; a Ray that is going is left to itself."""
    if gone():
        atexit.unregister(ray.shutdown)
    else:
        ray.shutdown()
        _processes.clear()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
