"""`flowgrpo-ray submit`: check a run here, upload what it reads, follow its log, exit with its status."""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowgrpo_ray import signals, storage
from flowgrpo_ray.cluster import job_server, package
from flowgrpo_ray.cluster.follow import Ended, follow
from flowgrpo_ray.cluster.job_server import JobServer
from flowgrpo_ray.cluster.package import Package
from flowgrpo_ray.config import Config, load
from flowgrpo_ray.config.paths import check_run_dir
from flowgrpo_ray.errors import ConfigError, HubError, ResourceError, counted, first_line
from flowgrpo_ray.preflight import check
from flowgrpo_ray.provenance import commit

UPLOAD_S = 300.0  # for at most 50 MiB
STOP_MARGIN_S = 15  # what ends after the checkpoint of `run.grace_s`: actors, the connection
# `python` of the job's environment, not the command: an image may hold what the run needs and not this package.
ENTRYPOINT = f"exec python -m flowgrpo_ray.cli train {package.CONFIG_FILE}"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Submission:
    """A run that is ready to be submitted.

    Attributes:
        run_dir: URI of the run's folder, without credentials.
        notes: what could not be checked or is not packed.
    """

    config: Config
    package: Package
    run_dir: str
    notes: list[str]

    @property
    def metadata(self) -> dict[str, str]:
        """What Ray's dashboard shows of the job, and `running` finds."""
        found = commit() or {"id": "unknown", "dirty": False}
        return {"run": self.config.run.name, "run_dir": self.run_dir, "commit": found["id"],
                "dirty": str(found["dirty"]).lower()}

    @property
    def env_vars(self) -> dict[str, str]:
        """Of the job: `ray job stop` kills after 3 s, unless the job's own environment says otherwise."""
        wait_s = math.ceil(self.config.run.grace_s) + STOP_MARGIN_S
        return {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}


def load_for_job(path: str, overrides: list[str] | None, working_dir: Path | None) -> Config:
    """The configuration of a run that is to be submitted; modules of your own are looked for in `working_dir` too."""
    if working_dir is not None and str(working_dir.absolute()) not in sys.path:
        sys.path.insert(0, str(working_dir.absolute()))
    return load(path, overrides, for_job=True)


def prepare(config: Config, *, working_dir: Path | None = None, image_code: bool = False) -> Submission:
    """Check a configuration (loaded `for_job`) as the run will, as far as that can be done here, and collect its files.

    Raises:
        ConfigError: names every input that is wrong.
    """
    check_run_dir(config.run.dir)
    notes, elsewhere = [], package.on_cluster_only(config)
    for key, uri in (("data.train_prompts", config.data.train_prompts), ("data.eval_prompts", config.data.eval_prompts)):
        if uri and "://" in uri and (why := _unreadable(uri)):
            notes.append(f"{key} is not checked here, but in the job: {why}")
            elsewhere.append(key)
    try:
        check(config, elsewhere)
    except HubError as error:
        notes.append(f"the model is not checked here, but in the job: {error}")
        check(config, [*elsewhere, "model.path"])
    built = package.build(config, working_dir=working_dir, image_code=image_code)
    run_dir = storage.redact(storage.join(config.run.dir, config.run.name))
    return Submission(config, built, run_dir, notes + built.notes)


def _unreadable(uri: str) -> str:
    """Why an object store cannot be read from here (no access, no connection), if so; the cluster may have both."""
    try:
        storage.size(uri)
    except OSError as error:  # and a deadline that has passed
        return first_line(error)
    return ""


def submit(submission: Submission, server: JobServer, say: Say) -> str:
    """Upload a run and submit it as a job; returns the submission id.

    Raises:
        ConfigError: another Ray or Python there, the run is in use, or the package is too large; nothing is uploaded.
        ResourceError: the cluster does not answer, or rejects the job or the token.
    """
    name = submission.config.run.name
    with tempfile.TemporaryDirectory(prefix="flowgrpo-submit-") as folder:
        archive = Path(folder) / "package.zip"
        size = submission.package.write(archive)
        say(f"package: {_size(size)}, {counted(len(submission.package.files), 'file')}, with {submission.package.code}")
        for note in submission.notes:
            say(f"note: {note}")
        job_server.check_versions(server)
        if other := job_server.running(server, submission.run_dir):
            theirs = str(other.submission_id)
            raise ConfigError(
                f"the run {name} in {storage.display(submission.run_dir)} is in use by the job {theirs}, "
                f"which is {other.status.lower()}. Follow it (`{server.command('logs --follow', theirs)}`), stop "
                f"it (`{server.command('stop', theirs)}`), or choose another run.name")
        job_id = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            server.ask(lambda client: client.submit_job(
                entrypoint=ENTRYPOINT, submission_id=job_id, metadata=submission.metadata,
                runtime_env={"working_dir": str(archive), "env_vars": submission.env_vars}),
                "the submission", UPLOAD_S)
        except (KeyboardInterrupt, signals.Terminated):
            say(f"interrupted while submitting; if the job is there, this stops it: {server.command('stop', job_id)}")
            raise
    return job_id


def follow_run(server: JobServer, job_id: str, write: Callable[[str], None], say: Say) -> int:
    """Write a job's log until it ends; returns the exit code of its run. Ctrl-C and SIGTERM leave the run to itself."""
    with _leaving(server, job_id, say):
        ended = follow(server, job_id, write, say)
    say(verdict(ended, job_id))
    return ended.code


def how_to(server: JobServer, job_id: str) -> str:
    """The commands that follow, watch and stop a job."""
    token = f" --token-file {shlex.quote(server.token_file)}" if server.token_file else ""
    watch = f"flowgrpo-ray status {job_id.rsplit('-', 2)[0]} --watch --address {shlex.quote(server.url)}{token}"
    return (f"  follow: {server.command('logs --follow', job_id)}\n  watch:  {watch}\n"
            f"  stop:   {server.command('stop', job_id)}")


@contextmanager
def _leaving(server: JobServer, job_id: str, say: Say):
    try:
        yield
    except (KeyboardInterrupt, signals.Terminated):
        say(f"\ndetached; the run goes on as job {job_id}\n{how_to(server, job_id)}")
        raise
    except ResourceError as error:
        raise type(error)(f"{error}\nThe job {job_id} may still be running:\n{how_to(server, job_id)}") from error


def verdict(ended: Ended, job_id: str) -> str:
    """How a job has ended, in a line."""
    if ended.status == "SUCCEEDED":
        return f"job {job_id} has succeeded"
    if ended.status == "STOPPED":
        return f"job {job_id} was stopped; the same command resumes the run from its newest checkpoint"
    if ended.exit_code == 127:
        return f"job {job_id} has failed: the cluster's PATH has no python (exit code 127)"
    if ended.code == 137:
        return f"job {job_id} has failed: it was killed (exit code 137), as a rule because its node was out of memory"
    if ended.exit_code is not None:
        return f"job {job_id} has failed with exit code {ended.code}"
    return f"job {job_id} has failed: {ended.message.strip() or 'Ray gives no reason'}"


def _size(size: int) -> str:
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 // 10 else f"{size / 2**10:.0f} KiB"
