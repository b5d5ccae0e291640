"""Proof that a run directory is one place for the driver and the learners: each sees what the other wrote.

Checkpoints are written by a learner and committed by the driver. With a folder that only has the same name on both nodes, or
an object store that only the driver has credentials for, the first checkpoint would fail, after all steps before it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

from flowgrpo_ray import signals, storage
from flowgrpo_ray.errors import ConfigError

_WAIT_S = 10.0  # network file systems show another machine's file after some seconds


def leave_token(run_dir: str) -> str:
    """Write a token file into a run directory; returns the token, which `answer` takes."""
    token = uuid.uuid4().hex
    storage.write_bytes(_file(run_dir, token), token.encode())
    return token


def answer(run_dir: str, token: str, who: str) -> str | None:
    """On the learner's side: see the token and write a file for the driver to see. Returns what is wrong, or None."""
    doing = "read"
    try:
        if not _appears(_file(run_dir, token)):
            return "does not see there what the driver wrote"
        doing = "write"
        storage.write_bytes(_file(run_dir, f"{token}-{who}"), token.encode())
    except OSError as error:
        return f"cannot {doing} there: {error.strerror or error}"
    return None


def check_answers(run_dir: str, token: str, answers: Mapping[str, str | None], places: Mapping[str, str]) -> None:
    """On the driver's side: see the file of everyone who answered, and remove all files.

    Args:
        answers: what `answer` returned, by who answered.
        places: their nodes, for the message.

    Raises:
        ConfigError: the run directory is not one folder for all.
    """
    try:
        for who, problem in answers.items():
            if problem is None and not _appears(_file(run_dir, f"{token}-{who}")):
                problem = "writes there what the driver does not see"
            if problem is not None:
                raise ConfigError(_message(run_dir, f"{who} on node {places[who]} {problem}"))
    finally:
        for name in (token, *(f"{token}-{who}" for who in answers)):
            storage.delete_file(_file(run_dir, name))


def _message(run_dir: str, problem: str) -> str:
    shown = storage.display(run_dir)
    if storage.local_path(run_dir) is None:
        return (f"run.dir: {shown}: {problem}. Checkpoints are written by the learners: every node needs access to the store, "
                "by its role or service account, or by credentials in the environment of its Ray processes (on Kubernetes a "
                "Secret in the worker groups' env)")
    return (f"run.dir: {shown} is a local folder, and the {problem}. On several nodes it must be a place that all reach: "
            "run.dir=s3://BUCKET/runs, run.dir=gs://BUCKET/runs, or the absolute path of a volume that is mounted on every "
            "node")


def _file(run_dir: str, name: str) -> str:
    return storage.join(run_dir, f".shared-{name}".replace(" ", "-"))


def _appears(uri: str) -> bool:
    deadline = time.monotonic() + _WAIT_S
    while storage.size(uri) is None:
        if time.monotonic() > deadline:
            return False
        signals.check()
        time.sleep(0.2)
    return True
