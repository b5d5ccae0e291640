"""Commands that run in the cluster as a short job: which lines of its log are theirs, and with which code they run."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from flowgrpo_ray.cluster import by_job, follow, job_server
from flowgrpo_ray.cluster.follow import Ended
from flowgrpo_ray.errors import ResourceError

CODE = {"working_dir": "gcs://_ray_pkg_1.zip", "env_vars": {"A": "1"}}


def job(code=CODE, over: bool = False, **metadata: str) -> SimpleNamespace:
    return SimpleNamespace(metadata=metadata or None, runtime_env=code,
                           status=SimpleNamespace(is_terminal=lambda: over))


def test_only_marked_lines_are_passed_on():
    out, err = [], []
    reader = by_job._Reader(out.append, err.append)
    for piece in ("Runtime env is setting up.\nflowgrpo-ray> run", "  first\nflowgrpo-ray! error: x\n(raylet) a node",
                  " died\nflowgrpo-ray> \n"):
        reader.take(piece)
    assert out == ["run  first", ""] and err == ["error: x"]
    assert reader.rest == ["Runtime env is setting up.", "(raylet) a node died"]


def test_a_command_in_the_job_marks_all_that_it_prints():
    done = subprocess.run([sys.executable, "-m", "flowgrpo_ray.cli", "status", "first", "--address", "127.0.0.1:1"],
                          capture_output=True, text=True, env={by_job.MARKED: "1", "RAY_ADDRESS": "127.0.0.1:1"})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("flowgrpo-ray! error: ") and all(
        line.startswith("flowgrpo-ray! ") for line in done.stderr.splitlines())
    stream = io.StringIO()
    marked = by_job._Marking(stream, "> ")
    marked.write("a\nb")
    marked.write("c\n")
    assert stream.getvalue() == "> a\n> bc\n"


@pytest.mark.parametrize(("jobs", "name", "code"), [
    ([], "first", None), ([job()], "first", None), ([job(run="first", run_dir="/r/first", over=True)], "first", None),
    ([job({}, run="first", run_dir="/r/first")], "first", None),
    ([job({"working_dir": "gcs://other"}, run="other", run_dir="/r/other"), job(run="first", run_dir="/r/first")], "first",
     "gcs://_ray_pkg_1.zip"),
    ([job(run="first", run_dir="s3://b/first")], "s3://b/first/", "gcs://_ray_pkg_1.zip"),
    ([job(run="first", run_dir="/r/first")], "1a2b3c", "gcs://_ray_pkg_1.zip")])
def test_the_code_is_that_of_the_run(jobs, name, code):
    assert by_job._code_of(jobs, name) == ({"working_dir": code} if code else {})


class Server:
    """A job server that runs a command, whose log is `log`."""

    def __init__(self, monkeypatch, log: str, end: Ended) -> None:
        self.did: list[tuple] = []
        monkeypatch.setattr(job_server, "find", lambda url, token_file: self)
        monkeypatch.setattr(follow, "follow", lambda server, job_id, write, say: (write(log), end)[1])

    def ask(self, call, what):
        return call(self)

    def list_jobs(self):
        return []

    def submit_job(self, **job):
        self.did.append(("submit", job["entrypoint"]))

    def stop_job(self, job_id):
        self.did.append(("stop",))

    def delete_job(self, job_id):
        self.did.append(("delete", job_id))


def test_a_command_s_lines_and_exit_code_are_those_of_its_job(monkeypatch):
    server, out = Server(monkeypatch, "setting up\nflowgrpo-ray> refused\n", Ended("FAILED", "", 2)), []
    assert by_job.run("http://h:8265", None, ["scale", "--", "a run", "rollout=0"], "a run", out.append, out.append) == 2
    assert out == ["refused"]
    assert server.did == [("submit", "FLOWGRPO_RAY_MARK_LINES=1 exec python -m flowgrpo_ray.cli scale -- 'a run' rollout=0")]


def test_commands_that_ended_some_seconds_ago_leave_the_list_of_jobs(monkeypatch):
    now = time.time() * 1000

    def command(name, ended_s, over=True):
        return SimpleNamespace(**vars(job(over=over, command="runs")), submission_id=name, end_time=now - 1000 * ended_s)

    server = Server(monkeypatch, "", Ended("SUCCEEDED", "", 0))
    jobs = [command("flowgrpo-ray-runs-1", 60), command("flowgrpo-ray-runs-2", 1), command("flowgrpo-ray-status-3", 60, False),
            command("mine", 60), SimpleNamespace(**vars(job(over=True, run="first", run_dir="/r")), submission_id="first-1",
                                                 end_time=now - 60_000)]
    server.list_jobs = lambda: jobs
    assert by_job.run("http://h:8265", None, ["runs"], None, print, print) == 0
    assert server.did[1:] == [("delete", "flowgrpo-ray-runs-1")]


@pytest.mark.parametrize(("log", "end", "message"), [
    ("/usr/bin/python: No module named flowgrpo_ray\n", Ended("FAILED", "", 1), "image has no flowgrpo-ray.*No module named"),
    ("", Ended("FAILED", "the node died", None), "the cluster could not run the command:\n  the node died")])
def test_a_command_that_could_not_run_is_an_error_with_the_end_of_its_log(monkeypatch, log, end, message):
    Server(monkeypatch, log, end)
    with pytest.raises(ResourceError, match=f"(?s){message}"):
        by_job.run("http://h:8265", None, ["runs"], None, print, print)


def test_a_command_that_is_interrupted_is_stopped(monkeypatch):
    server = Server(monkeypatch, "", Ended("", "", None))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        by_job.run("http://h:8265", None, ["status", "--watch", "--", "x"], "x", print, print)
    assert server.did[1:] == [("stop",)]
