"""Run a command inside a Ray cluster, as a short job: so whoever can submit can also command.

The job's log mixes what the command prints with what Ray says. So the command marks its own lines, each with the stream that
it goes to, and only those are shown here. If the run was submitted with its code, the job uses that code.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from flowgrpo_ray.errors import FlowGrpoError, ResourceError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from flowgrpo_ray.cluster.follow import Ended

MARKED = "FLOWGRPO_RAY_MARK_LINES"  # environment variable of a command that marks its lines
_ID = "flowgrpo-ray-"  # begins the submission ids of commands
_SETTLED_S = 10.0
_MARKS = {"stdout": "flowgrpo-ray> ", "stderr": "flowgrpo-ray! "}

Say = Callable[[str], None]


def dashboard(address: str | None) -> str | None:
    """The URL that a command goes through, None for one that connects to Ray itself."""
    given = address or os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_API_SERVER_ADDRESS")
    return given if given and given.startswith(("http://", "https://")) else None


def run(url: str, token_file: str | None, args: Sequence[str], name: str | None, out: Say, err: Say) -> int:
    """Run `flowgrpo-ray ARGS` in the cluster, pass its lines on, and return its exit code.

    Args:
        name: of the run that the command is for, or its run directory; None for a command for all.
        out, err: take lines without their end.

    Raises:
        ResourceError: the cluster cannot be reached, or cannot run the command.
    """
    from flowgrpo_ray.cluster import job_server
    from flowgrpo_ray.cluster.follow import follow

    server = job_server.find(url, token_file)
    entrypoint = f"{MARKED}=1 exec python -m flowgrpo_ray.cli {shlex.join(args)}"
    job_id = f"{_ID}{args[0]}-{uuid.uuid4().hex[:8]}"

    def submit(client: JobSubmissionClient) -> None:
        jobs = client.list_jobs()
        client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=_code_of(jobs, name),
                          metadata={"command": shlex.join(args)})
        for old in _to_delete(jobs):
            with suppress(RuntimeError):  # another command has done it
                client.delete_job(old)

    server.ask(submit, f"the command {args[0]}")
    reader, ended = _Reader(out, err), False
    try:
        end = follow(server, job_id, reader.take, err)
        ended = True
    finally:
        if not ended:
            with suppress(FlowGrpoError):
                server.ask(lambda client: client.stop_job(job_id), "the end of the command")
    if not reader.lines and end.code:
        raise ResourceError(_could_not_run(end, reader.rest))
    return end.code


def _to_delete(jobs: Sequence[Any]) -> list[str]:
    """Submission ids of commands that have ended: the list of jobs is for runs. Ray looks at a job once more after its end, and
    lists one that was deleted before as failed; so the next command deletes it, some seconds later."""
    latest = (time.time() - _SETTLED_S) * 1000
    return [job.submission_id for job in jobs if job.status.is_terminal() and "command" in (job.metadata or {})
            and str(job.submission_id).startswith(_ID) and (job.end_time or 0) < latest]


def _code_of(jobs: Sequence[Any], name: str | None) -> dict[str, str]:
    """The runtime environment of the command's job: the code that a living run was submitted with, if it was with any."""
    runs = [(job.metadata, job.runtime_env["working_dir"]) for job in jobs if not job.status.is_terminal()
            and "run_dir" in (job.metadata or {}) and (job.runtime_env or {}).get("working_dir")]
    meant = [code for known, code in runs if name is not None and name.rstrip("/") in (
        known.get("run"), known["run_dir"].rstrip("/"))]
    codes = meant or [code for _, code in runs]  # it may be named by its run id
    return {"working_dir": codes[0]} if codes else {}


def _could_not_run(end: Ended, log: Sequence[str]) -> str:
    tail = "".join(f"\n  {line}" for line in log[-10:]) or f"\n  {end.message.strip()}"
    missing = any("No module named" in line and "flowgrpo_ray" in line for line in log) or end.exit_code == 127
    hint = (". The cluster's image has no flowgrpo-ray of this version, and no living run was submitted with its code "
            "(`flowgrpo-ray submit`)" if missing else "")
    return f"the cluster could not run the command{hint}:{tail}"


class _Reader:
    """Takes pieces of a log and passes the marked lines on; `rest` are the others."""

    def __init__(self, out: Say, err: Say) -> None:
        self._say = {_MARKS["stdout"]: out, _MARKS["stderr"]: err}
        self._begun, self.lines = "", 0
        self.rest: list[str] = []

    def take(self, text: str) -> None:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            mark = next((mark for mark in self._say if line.startswith(mark)), None)
            if mark is None:
                self.rest.append(line)
            else:
                self.lines += 1
                self._say[mark](line.removeprefix(mark))


# In the job -----------------------------------------------------------------------------------------------------------

class _Marking(io.TextIOBase):
    """Writes whole lines to a stream, each after a mark."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream, self._mark, self._begun = stream, mark, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._stream.write(f"{self._mark}{line}\n")
        self._stream.flush()
        return len(text)


def mark_lines() -> None:
    """Mark what this process writes from now on, if it is the command of such a job."""
    if os.environ.pop(MARKED, None):
        sys.stdout, sys.stderr = (_Marking(stream, _MARKS[name]) for name, stream in (
            ("stdout", sys.stdout), ("stderr", sys.stderr)))
