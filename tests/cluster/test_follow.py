"""The log of a job comes once and whole, whatever becomes of the connection."""

from __future__ import annotations

import pytest
import ray
from clusters import free_port
from played_job_server import Job, PlayedServer

from flowgrpo_ray.cluster import follow as module
from flowgrpo_ray.cluster.follow import Ended, follow
from flowgrpo_ray.cluster.job_server import JobServer, TokenError, Unreachable
from flowgrpo_ray.cluster.submit import verdict
from flowgrpo_ray.errors import ResourceError


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(module, "YOUNG_EVERY_S", 0.01)
    with PlayedServer(ray.__version__, None) as server:
        yield server


def followed(played, name="j") -> tuple[Ended, str, list[str]]:
    text, said = [], []
    return follow(JobServer(played.url), name, text.append, said.append), "".join(text), said


@pytest.mark.parametrize(("job", "code"), [
    (Job("SUCCEEDED", exit_code=0), 0), (Job("FAILED", exit_code=2), 2), (Job("FAILED", exit_code=-9), 137),
    (Job("FAILED", "runtime_env setup failed"), 1), (Job("STOPPED"), 143)])
def test_a_job_that_has_ended(played, job, code):
    job.pieces = ["a\n", "b\n"]
    played.jobs["j"] = job
    ended, text, said = followed(played)
    assert (ended.code, ended.message, text, said) == (code, job.message, "a\nb\n", [])


@pytest.mark.parametrize(("ended", "words"), [
    (Ended("SUCCEEDED", "", 0), "succeeded"), (Ended("FAILED", "log", 2), "failed with exit code 2"),
    (Ended("FAILED", "log", 127), "PATH has no python"), (Ended("FAILED", "log", -9), "out of memory"),
    (Ended("FAILED", "Job supervisor actor died", None), "failed: Job supervisor actor died"),
    (Ended("STOPPED", "", None), "stopped")])
def test_the_last_line_says_how_it_ended(ended, words):
    assert words in verdict(ended, "j-1")


def test_the_stream_is_cut_and_nothing_is_written_twice(played, monkeypatch):
    monkeypatch.setattr(module, "YOUNG_BYTES", 0)
    pieces = ["one\n", "zwölf\n", "thr", None, "ee\n", "four\n", None, "five\n"]
    played.jobs["j"] = Job(pieces=pieces)
    ended, text, said = followed(played)
    assert text == "one\nzwölf\nthree\nfour\nfive\n" and ended.code == 0
    assert played.streams == 3
    assert [line.split(" to ")[0] for line in said] == ["connection", "connected"] * 2


def test_a_young_log_goes_over_into_the_stream(played, monkeypatch):
    monkeypatch.setattr(module, "YOUNG_BYTES", 4)
    played.jobs["j"] = Job(pieces=["one\n", "two\n", "three\n"])
    ended, text, said = followed(played)
    assert (text, played.streams, said, ended.code) == ("one\ntwo\nthree\n", 1, [], 0)


def test_a_server_that_comes_back(played):
    played.jobs["j"] = Job("FAILED", exit_code=3, pieces=["a\n"])
    played.refusing = 2
    ended, text, said = followed(played)
    assert (ended.code, text) == (3, "a\n")
    assert len(said) == 2 and "lost (HTTP 503)" in said[0] and "again" in said[1]


def test_a_server_that_does_not_come_back(monkeypatch):
    monkeypatch.setattr(module, "GIVE_UP_S", 0.3)
    with pytest.raises(Unreachable, match="no job server answers.*connect"):
        follow(JobServer(f"http://127.0.0.1:{free_port()}"), "j", print, print)


def test_a_job_that_is_gone_and_a_token_that_is_no_longer_right(played):
    with pytest.raises(ResourceError, match="does not know the job j"):
        followed(played)
    played.token = "new"
    with pytest.raises(TokenError):
        followed(played)
