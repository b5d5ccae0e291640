"""Ray's processes, where this process has started them: whether they are still there.

A signal to a whole process group (from `timeout`, or a job system) ends Ray's own processes together with the driver. Whatever
the driver asks of Ray then waits, its main thread cannot even handle the signal, and when the raylet has ended (some seconds
later) Ray's library ends the driver without a word. So a thread watches for the signal and leaves at once: what has to outlive
the driver is on disk already.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private.node import Node

from flowgrpo_ray import signals, waiting
from flowgrpo_ray.errors import ResourceError
from flowgrpo_ray.ray_token import token_in_file
from flowgrpo_ray.views import log_lines

last_words = ""  # what is lost if this process ends now
_processes: list[psutil.Process] = []  # the head's: gcs_server, raylet, the log monitor and the like
_vital: dict[str, psutil.Process] = {}  # of these, by name, the ones without which nothing goes on
worker_env: dict[str, str] = {}  # variables that every worker process of a head started here has from the beginning


def start(env: dict[str, str], **options: Any) -> str:
    """`ray.init` on this machine, with a head of its own.

    Args:
        env: variables of all its workers. Ray keeps workers without a runtime_env ready, so an actor that needs no others is
            up sooner.
        options: of `ray.init`.

    Returns:
        where its dashboard is, with the token that it asks for; an empty string where it has none.
    """
    token = _give_token()
    before = {child.pid for child in psutil.Process().children()}
    # Ray starts as many workers at a time as there are cores: one more actor would wait until another has started.
    workers = min(int(options.get("num_cpus") or 1), 2 * len(os.sched_getaffinity(0)))
    during = {"RAY_worker_maximum_startup_concurrency": str(workers), **env}
    own = {key: os.environ.get(key) for key in during}
    os.environ.update(during)
    try:
        with _without(*_unneeded(options)):
            url = ray.init(address="local", **options).dashboard_url
    finally:
        for key, value in own.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    worker_env.update(env)
    _processes[:] = [child for child in psutil.Process().children() if child.pid not in before]
    _vital.update({name: child for child in _processes if (name := child.name()) in ("raylet", "gcs_server")})
    if threading.current_thread() is threading.main_thread():
        signals.watch(_leave_with_ray)
    return f"http://{url}{f' (token {token})' if token else ''}" if url else ""


def _unneeded(options: Mapping[str, Any]) -> list[str]:
    """Starts of Ray's own processes that a head on this machine does without: `ray.init` starts them whatever its options
    are, and waits a second for the dashboard's server."""
    unneeded = []
    if not options.get("include_dashboard"):  # the autoscaler's monitor has nothing to scale, and nobody asks it then
        unneeded += ["start_api_server", "start_monitor"]
    if not options.get("log_to_driver"):  # it sends the workers' output to the driver
        unneeded.append("start_log_monitor")
    return unneeded


@contextmanager
def _without(*starts: str) -> Iterator[None]:
    """Inside, Ray does not start some of its processes. Those that a version of Ray calls otherwise are started as ever."""
    found = {name: start for name in starts if (start := vars(Node).get(name)) is not None}
    try:
        for name in found:
            setattr(Node, name, lambda self, *args, **kwargs: None)
        yield
    finally:
        for name, start in found.items():
            setattr(Node, name, start)


def _give_token() -> str:
    """A token for the Ray that starts here, where the user has none; it is known to this process and those that it starts.

    Ray's own nodes talk over the machine's network address, so they keep Ray's token authentication (on by default from 2.60
    on). Left to itself Ray would write a new token to ~/.ray/auth_token, and from then on every `ray start` of the user's
    would want it.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or any(
            os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return ""
    if token_in_file():
        return ""
    token = os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return token


def connect(address: str, timeout_s: float, **options: Any) -> None:
    """`ray.init(address=...)` within `timeout_s`, in a thread: Ray's library tries a dead address for
    minutes and holds the calling thread meanwhile. (A head of our own is started in the main thread:
    Ray's processes end with the thread that started them.)

    Raises:
        ConnectionError: nothing listens at the address.
        DeadlineError: no answer in time.
        Whatever `ray.init` raises.
    """
    logger = logging.getLogger("ray._private.worker")

    def init() -> None:
        _check_listening(address, timeout_s)
        level = logger.level
        logger.setLevel(logging.ERROR)  # a warning that here Ray leaves our SIGTERM handler alone
        try:
            ray.init(address=address, **options)
        finally:
            logger.setLevel(level)

    waiting.bounded(init, f"Ray at {address}", timeout_s, setting="pools.connect_timeout_s")


def _check_listening(address: str, timeout_s: float) -> None:
    """Raise ConnectionError where nothing takes a connection at `host:port`; other forms of an address
    are Ray's to judge."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    # Ray takes this machine's own address for localhost.
    hosts = [host]
    if host in ("localhost", "127.0.0.1"):
        hosts.append(ray.util.get_node_ip_address())
    for last, name in enumerate(hosts, 1 - len(hosts)):
        try:
            socket.create_connection((name.strip("[]"), int(port)), timeout=timeout_s).close()
            return
        except (OSError, OverflowError) as error:
            if last == 0:
                raise ConnectionError(f"nothing takes connections there: {error}") from error


def _leave_with_ray(number: int) -> None:
    """End this process where SIGTERM came to Ray's processes too; where it did not, the main thread ends in good order."""
    if number == signal.SIGTERM and gone(wait_s=60.0):
        lost = f" ({last_words})" if last_words else ""
        text = log_lines.marked(f"terminated, and Ray with it; the same command resumes from the newest checkpoint{lost}")
        os.write(2, f"{text}\n".encode())
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


def check() -> None:
    """Raise ResourceError where Ray was started here and cannot go on, as one of its processes has ended."""
    for name, process in _vital.items():
        if not _alive(process):
            raise ResourceError(f"Ray's process {name} (pid {process.pid}) has ended: it was killed, or memory ran out. The "
                                "same command resumes from the newest checkpoint")


def shut_down() -> None:
    """End the connection, and Ray where this process has started it; a Ray that is going is left to itself."""
    if gone():
        atexit.unregister(ray.shutdown)
    else:
        _processes.clear()
        _vital.clear()
        worker_env.clear()
        if threading.current_thread() is threading.main_thread():
            signals.unwatch(_leave_with_ray)
        ray.shutdown()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
