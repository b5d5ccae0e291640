"""Environments of rewards: another Python on the nodes, or one that Ray makes with pip (`rewards.<name>.environment`).

A foreign Python needs the Ray of the run, numpy and what its reward imports; this package is not installed in it. It finds
`actors` and `flowgrpo_ray` through the folder actors/foreign, which holds nothing else, so that nothing of the run's own
environment gets in. The folder is part of the package: it lies at the same path on every node that runs the same image.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RuntimeEnvSetupError

from flowgrpo_ray.config import Config
from flowgrpo_ray.config.schema import EnvironmentConfig, PoolConfig
from flowgrpo_ray.errors import ConfigError

log = logging.getLogger(__name__)

FOREIGN = Path(__file__).absolute().parent / "foreign"

_ASK = """
import importlib.metadata, json, platform
found = {"python": platform.python_version()}
for name in ("ray", "numpy"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def runtime_env(environment: EnvironmentConfig | None, env: dict[str, str], start_timeout_s: float) -> dict[str, Any]:
    """Ray's runtime_env of an actor: environment variables, and where it has one an environment of its own.

    In a foreign Python, PYTHONPATH is our folder and then what `env` says; that of the node is left out, as packages of
    another environment may be on it.
    """
    if environment is not None and environment.pip:
        return {"env_vars": env, "pip": list(environment.pip),
                "config": {"setup_timeout_seconds": max(1, int(start_timeout_s))}}
    if environment is None or not environment.py_executable:
        return {"env_vars": env} if env else {}
    path = os.pathsep.join([str(FOREIGN), *filter(None, [env.get("PYTHONPATH")])])
    # Ray hands the path to a shell.
    return {"env_vars": env | {"PYTHONPATH": path}, "py_executable": shlex.quote(environment.py_executable)}


def start_hint(name: str, environment: EnvironmentConfig) -> str:
    """What to add where a reward's actor was not ready in time: Ray is silent about the causes."""
    if environment.pip:
        return (f"; Ray makes the environment of rewards.{name}.environment.pip on every node first, which takes minutes: "
                "see runtime_env_setup-*.log in Ray's logs, and raise pools.start_timeout_s if it is only slow")
    if environment.py_executable:
        return (f"; does {environment.py_executable} (rewards.{name}.environment.py_executable) exist, with Ray "
                f"{ray.__version__}, on every node that the actor can be placed on?")
    return ""


def setup_reason(error: RuntimeEnvSetupError) -> str:
    """Why Ray could not make an environment, without its tracebacks: pip's own errors, or the deadline."""
    lines = [line.strip() for line in str(error).splitlines()]
    own = [line for line in lines if line.startswith("ERROR:")]
    late = [line.partition(" Consider ")[0] for line in lines if "within the timeout of" in line]
    return "; ".join(own or late[:1] or [line for line in lines if line][-1:])


def check_environments(config: Config) -> None:
    """Look at every foreign Python before any actor starts: Ray tries for ever to start one that is not there.

    Where all of Ray is on this machine it is looked at from here; on a cluster by a task that is placed as an actor of the
    reward would be. With no node for that task yet (an autoscaler), the check is left out, and the log says so.

    Raises:
        ConfigError: it is not there, does not run, or has another Ray or another Python than the run; both are named.
    """
    for name, reward in config.rewards.items():
        path = reward.environment.py_executable
        if not path:
            continue
        what = f"rewards.{name}.environment.py_executable {path!r}"
        found = examine(path) if _all_here() else _examine_there(what, path, config.reward_pool(name))
        if found is not None:
            problem = _problem(found, path)
            if problem:
                raise ConfigError(f"{what} on {found['node']} {problem}")


def examine(path: str) -> dict[str, str | None]:
    """Versions of `python`, `ray` and `numpy` (None: not there) in the environment of an interpreter, and the `node`; an
    `error` where it cannot be run."""
    out: dict[str, str | None] = {"node": platform.node(), "error": None}
    if not os.path.isfile(path):
        return out | {"error": "does not exist" if not os.path.exists(path) else "is no file, but a folder"}
    if not os.access(path, os.X_OK):
        return out | {"error": "is not executable"}
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(  # what is no Python would quote an argument in its errors
            [path, "-"], input=_ASK, capture_output=True, text=True, errors="replace", timeout=60, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return out | {"error": f"cannot be run: {error}"}
    printed = (done.stdout.splitlines() or [""])[-1]
    found = _versions(printed)
    if found is None:
        said = f"it printed {printed[:200]!r}" if printed else f"exit code {done.returncode}"
        return out | {"error": f"does not run as a Python does: {(done.stderr.strip().splitlines() or [said])[-1][:200]}"}
    return out | found


def _versions(printed: str) -> dict[str, str | None] | None:
    """What `_ASK` printed; None where a line is none of its."""
    try:
        found = json.loads(printed)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or set(found) != {"python", "ray", "numpy"} or not isinstance(found["python"], str):
        return None
    return found if all(value is None or isinstance(value, str) for value in found.values()) else None


def _problem(found: dict[str, str | None], path: str) -> str | None:
    """What is wrong with a foreign Python, as the end of a sentence."""
    if found["error"]:
        return found["error"]
    ours, theirs = (ray.__version__, platform.python_version()), (found["ray"], str(found["python"]))
    both = f"Python {theirs[1]} with Ray {theirs[0] or '(none)'}, and the run has Python {ours[1]} with Ray {ours[0]}"
    if theirs[1].split(".")[:2] != ours[1].split(".")[:2]:
        return f"is {both}: the first two parts of Python's version have to agree"
    if theirs[0] != ours[0]:
        return f"is {both}: both need the same Ray: {path} -m pip install ray=={ours[0]} numpy"
    if found["numpy"] is None:
        return f"has no numpy, which a reward's actor needs: {path} -m pip install numpy"
    return None


def _all_here() -> bool:
    """Is this machine the only node of Ray?"""
    here = ray.util.get_node_ip_address()
    return all(node["NodeManagerAddress"] == here for node in ray.nodes() if node["Alive"])


def _examine_there(what: str, path: str, pool: PoolConfig, wait_s: float = 30.0) -> dict[str, str | None] | None:
    """`examine`, on a node that can hold an actor of the pool; None where there is none yet."""
    options: dict[str, Any] = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus, "max_retries": 0}
    if pool.label_selector:
        options["label_selector"] = dict(pool.label_selector)
    ref = ray.remote(examine).options(**options).remote(path)
    if not ray.wait([ref], timeout=wait_s)[0]:
        ray.cancel(ref)
        log.warning("%s could not be looked at: no node could take the task that does so within %g s", what, wait_s)
        return None
    return ray.get(ref, timeout=60)
