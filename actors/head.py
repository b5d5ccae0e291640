"""Ray's processes, where this process has started them: whether they are still there.

A signal to a whole process group (from `timeout`, or a job system) ends Ray's own processes together with the driver. Whatever
the driver asks of Ray then waits, its main thread cannot even handle the signal, and when the raylet has ended (some seconds
later) Ray's library ends the driver without a word. So a thread watches for the signal and leaves at once: what has to outlive
the driver is on disk already.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
import time

import psutil
import ray

_processes: list[psutil.Process] = []  # the head's: gcs_server, raylet, the log monitor and the like


def start(**options: object) -> None:
    """`ray.init` on this machine, with a head of its own."""
    before = {child.pid for child in psutil.Process().children()}
    ray.init(address="local", **options)
    _processes[:] = [child for child in psutil.Process().children() if child.pid not in before]
    if threading.current_thread() is threading.main_thread():
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)  # gets every signal's number, whatever the main thread does
        threading.Thread(target=_leave_with_ray, args=(told,), daemon=True).start()


def _leave_with_ray(told: int) -> None:
    """End this process where SIGTERM came to Ray's processes too; where it did not, the main thread ends in good order."""
    while _processes:
        if select.select([told], [], [], 0.5)[0] and signal.SIGTERM in os.read(told, 64) and gone(wait_s=2.0):
            os.write(2, b"terminated, and Ray with it; the same command goes on from the newest checkpoint\n")
            os._exit(128 + signal.SIGTERM)  # what is left of Ray's processes goes with this one


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
        _processes.clear()  # the watching thread ends with that
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        ray.shutdown()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
