"""Reach the runs of a Ray cluster as a short driver: connect, find a run's control actor, ask it.

Only a process on a node of the cluster can connect so; from elsewhere `by_job` runs the command in the cluster.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from flowgrpo_ray import signals
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, ResourceError
from flowgrpo_ray.ray_token import token_in_file
from flowgrpo_ray.views.status import CONTROL_NAMESPACE, CONTROL_PREFIX, RunStatus

CONNECT_S = 15.0
FIND_S = 8.0  # that a control actor which is made again takes at most, in all but the worst case
REPLY_S = 60.0  # until a driver that is busy (with its storage, say) takes a command
_STATUS_S = 2.0
_POLL_S = 0.5
_LOOKS = 8
_CONTROL_TITLE = re.compile(r"ray::(\S+) step \d+/\d+ ")  # see ControlActor


@dataclass(frozen=True)
class Run:
    """A living run: its control actor, its newest status, and how old that is in seconds."""

    actor: Any
    status: RunStatus
    age_s: float


class GoneError(FlowGrpoError):
    """No control actor answers for a run."""


# Connect --------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class LocalRay:
    """A Ray node on this machine: the address of its cluster's head, who started it, the token that it uses, and the names
    of the runs whose control actor is here."""

    address: str
    started_by: str
    token: str | None
    runs: frozenset[str] = frozenset()


def local_rays() -> list[LocalRay]:
    """Clusters that this machine is a node of."""
    found = {}
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] != "raylet":
                continue
            address = next((part.partition("=")[2] for part in process.cmdline() if part.startswith("--gcs-address=")), None)
            if address is None:
                continue
            parent, token = process.parent(), None
            started_by = shlex.join(parent.cmdline()[:6]) if parent is not None and parent.pid != 1 else "ray start"
            if process.username() == psutil.Process().username():
                token = process.environ().get("RAY_AUTH_TOKEN")
            titles = [(child.cmdline() or [""])[0] for child in process.children()]
            runs = {match[1] for title in titles if (match := _CONTROL_TITLE.match(title))}
            found[address] = LocalRay(address, started_by, token, frozenset(runs))
        except psutil.Error:
            continue  # it ended, or is somebody else's
    return list(found.values())


def _choose(address: str | None, run: str | None = None) -> str:
    """The address to connect to, of several Rays on this machine that of the one with the run, with the token of one that this
    user's `train` has started (see `actors.head`)."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    here = local_rays()
    if address is None:
        for _ in range(_LOOKS if run is not None and len(here) > 1 else 0):  # a title is back after each call of the actor
            having = [ray for ray in here if run in ray.runs]
            if having:
                here = having if len(having) == 1 else here
                break
            time.sleep(_POLL_S / 5)
            here = local_rays()
        if len(here) != 1:
            lines = "".join(f"\n  --address {ray.address}   ({ray.started_by})" for ray in here)
            raise ConfigError("no Ray runs on this machine: give --address http://HOST:8265, or on a node of the cluster "
                              "--address HOST:6379" if not here else
                              f"{len(here)} Rays run on this machine; which one?{lines}")
        address = here[0].address
    elif not here:
        raise ResourceError(f"no Ray node runs on this machine, so it cannot connect to {address}. From outside the cluster "
                            "give the address of the dashboard: --address http://HOST:8265")
    if "RAY_AUTH_MODE" not in os.environ and token_in_file():
        os.environ["RAY_AUTH_MODE"] = "token"  # as `ray start` does where there is one; Ray's clients would send none
    token = next((ray.token for ray in here if ray.address == address), None)
    if token and not any(os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = token
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    return address


@contextmanager
def connected(address: str | None = None, run: str | None = None) -> Iterator[None]:
    """A connection to a running Ray: `address`, else RAY_ADDRESS, else the one on this machine, of several the one that has
    a run of this name. None is ever started.

    Raises:
        ConfigError: there is no Ray, or more than one, to choose from.
        ResourceError: it cannot be reached.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        yield
        return
    address = _choose(address, run)  # before Ray is imported, which reads the token then
    import ray

    from actors import head
    from actors.ray_errors import cannot_connect

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        head.connect(address, CONNECT_S, namespace=CONTROL_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise cannot_connect(error, address) from error
    try:
        yield
    finally:
        ray.shutdown()


# Find -----------------------------------------------------------------------------------------------------------------

def living() -> list[Run]:
    """The runs of the connected cluster whose control actor answers, by start."""
    import ray

    asked: dict[ray.ObjectRef, Any] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == CONTROL_NAMESPACE and actor["name"].startswith(CONTROL_PREFIX):
            try:
                handle = ray.get_actor(actor["name"], namespace=CONTROL_NAMESPACE)
            except ValueError:  # it is gone since
                continue
            asked[handle.status.remote()] = handle
    runs = []
    if asked:
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_STATUS_S)
        for ref in ready:
            try:
                tree, age = ray.get(ref, timeout=_STATUS_S)
            except ray.exceptions.RayError:
                continue
            runs.append(Run(asked[ref], RunStatus.from_json(tree), age))
    return sorted(runs, key=lambda run: run.status.started)


def full_name(name: str) -> str:
    """RUN of a command line: the path of a run directory made absolute, a name or a run id as it is."""
    if "://" in name or os.sep not in name and name not in (".", ".."):
        return name
    return os.path.abspath(os.path.expanduser(name))


def matches(name: str, status: RunStatus) -> bool:
    """Whether a run is the one that is meant: by its name, its run id or its directory."""
    if "/" not in name:
        return name in (status.run, status.run_id)
    return name.rstrip("/") == status.run_dir or (
        "://" not in name and os.path.realpath(name) == os.path.realpath(status.run_dir))


def find(name: str, wait_s: float = FIND_S) -> Run:
    """The run of this name, run id or directory; waits for a control actor that is being made again.

    Raises:
        ConfigError: there are several.
        GoneError: there is none within `wait_s`; says which there are, and where to look.
    """
    deadline = time.monotonic() + wait_s
    while True:
        runs = living()
        found = [run for run in runs if matches(name, run.status)]
        if len(found) == 1:
            return found[0]
        if found:
            lines = "".join(f"\n  {run.status.run_id}  {run.status.run_dir}" for run in found)
            raise ConfigError(f"{len(found)} runs are named {name!r}; give the run id or the run directory of one:{lines}")
        if time.monotonic() >= deadline:
            raise GoneError(_nobody(name, runs))
        signals.check()
        time.sleep(_POLL_S)


def _nobody(name: str, runs: list[Run]) -> str:
    names = ", ".join(f"{run.status.run} ({run.status.run_dir})" for run in runs)
    there = f"the runs that answer here are {names}" if runs else "no run answers here"
    where = f"{name}/checkpoints" if "/" in name else "RUN_DIR/checkpoints"
    return (f"no run {name!r} answers; {there}. If its driver lives (`ray job list` shows it), its control actor is being made "
            f"again: try once more in half a minute. If not, the run has ended; its newest checkpoint is in {where}, and the "
            "command that started it resumes from there")


# Ask ------------------------------------------------------------------------------------------------------------------

def ask(run: Run, command: str, args: dict[str, Any], say: Callable[[str], None]) -> int:
    """Give a run a command, pass each reply to `say`, and return the code of the last one.

    If the control actor dies meanwhile, the one that is made in its place is asked the same under the same id, so a command
    is carried out once.

    Raises:
        GoneError: the run ended, or its control actor was not made again, before the last reply.
        FlowGrpoError: the driver did not take the command in time.
    """
    import ray

    number, actor = 0, run.actor
    asked = time.monotonic()
    client = uuid.uuid4().hex
    ref = actor.ask.remote(client, command, args, number)
    try:
        while True:
            signals.check()
            if not ray.wait([ref], timeout=_POLL_S)[0]:
                if number == 0 and time.monotonic() - asked > REPLY_S:
                    raise FlowGrpoError(
                        f"the driver of {run.status.run} has not taken the command within {REPLY_S:g} s: it may be busy with "
                        f"its storage (phase {run.status.phase}); the command stands, and is carried out when the driver is "
                        "free")
                continue
            try:
                reply = ray.get(ref, timeout=_STATUS_S)
            except ray.exceptions.RayActorError:
                actor = find(run.status.run_id).actor
                ref = actor.ask.remote(client, command, args, number)
                continue
            say(reply["text"])
            if reply["final"]:
                return reply["code"]
            number += 1
            ref = actor.ask.remote(client, command, args, number)
    finally:
        goodbye(actor, client)


def goodbye(actor: Any, client: str) -> None:
    """Tell a control actor that this client waits for nothing more: at its end a run waits for those that do."""
    import ray

    ray.wait([actor.goodbye.remote(client)], timeout=_STATUS_S)
