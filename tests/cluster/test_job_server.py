"""The job server of a cluster: addresses, tokens, versions, runs in use."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import ray
from clusters import free_port
from played_job_server import Job, PlayedServer
from ray.job_submission import JobStatus

from flowgrpo_ray.cluster import job_server
from flowgrpo_ray.cluster.job_server import JobServer, TokenError, Unreachable, check_versions, find, running
from flowgrpo_ray.cluster.submit import how_to
from flowgrpo_ray.errors import ConfigError

PYTHON = platform.python_version()


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_address(monkeypatch):
    assert find("http://head:8265/").url == "http://head:8265"
    with pytest.raises(ConfigError, match="give --address http://HOST:8265"):
        find(None)
    for wrong in ("head:6379", "ray://head:10001", "head"):
        with pytest.raises(ConfigError, match=r"give --address http://head:8265"):
            find(wrong)
    monkeypatch.setenv("RAY_ADDRESS", "http://other:8265")
    assert find(None).url == "http://other:8265"
    assert find("http://head:8265").url == "http://head:8265", "what is given goes before the environment"


def test_the_token(monkeypatch, tmp_path):
    def sent(token_file=None):
        return find("http://head:8265", token_file).headers.get("Authorization")

    (tmp_path / "given").write_text("from-file\n")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("ray-s-own")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert sent() is None and sent(str(tmp_path / "given")) == "Bearer from-file"
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert sent() == "Bearer ray-s-own"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "given"))
    assert sent() == "Bearer from-file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "from-env")
    assert sent() == "Bearer from-env"
    assert "from-env" not in repr(find("http://head:8265"))
    for text, message in (("", "must hold the token and nothing else"), ("two words", "must hold the token")):
        (tmp_path / "wrong").write_text(text)
        with pytest.raises(ConfigError, match=message):
            sent(str(tmp_path / "wrong"))
    with pytest.raises(ConfigError, match="--token-file .*none cannot be read: No such file"):
        sent(str(tmp_path / "none"))


@pytest.mark.parametrize(("sent", "message"), [
    (None, r"wants an authentication token, and none was sent \(HTTP 401\)"),
    ("wrong", r"does not take the authentication token that was sent \(HTTP 403\)")])
def test_a_token_that_is_missing_or_wrong(sent, message):
    with PlayedServer(ray.__version__, PYTHON, token="right") as played:
        server = JobServer(played.url, sent)
        for ask in (lambda: check_versions(server), lambda: running(server, "/x")):
            with pytest.raises(TokenError, match=message) as caught:
                ask()
            assert "kubectl get secret CLUSTER" in str(caught.value) and "wrong" not in str(caught.value)
        check_versions(JobServer(played.url, "right"))
        assert running(JobServer(played.url, "right"), "/x") is None


@pytest.mark.parametrize(("theirs", "python", "message"), [
    (ray.__version__, None, None),
    (ray.__version__, PYTHON.rpartition(".")[0] + ".99", None),
    ("2.51.0", PYTHON, rf"runs Ray 2\.51\.0 on Python {PYTHON}, and this command Ray {ray.__version__} on Python {PYTHON}\. .*"
                       r"\(pip install 'ray\[default\]==2\.51\.0'\), or give"),
    (ray.__version__, "3.99.1", rf"Ray {ray.__version__} on Python 3\.99\.1, and this .*==.*, in Python 3\.99\), or give")])
def test_another_ray_or_python_on_the_cluster(theirs, python, message):
    with PlayedServer(theirs, python) as played:
        if message is None:
            check_versions(JobServer(played.url))
            return
        with pytest.raises(ConfigError, match=message):
            check_versions(JobServer(played.url))


def test_nobody_at_the_address(monkeypatch):
    nobody = JobServer(f"http://127.0.0.1:{free_port()}")
    for ask in (lambda: check_versions(nobody), lambda: running(nobody, "/x")):
        with pytest.raises(Unreachable, match="no job server answers at .*kubectl port-forward"):
            ask()
    with PlayedServer(ray.__version__, PYTHON) as played:
        played.refusing = 99
        with pytest.raises(Unreachable, match=r"its answer to /api/version \(HTTP 503\) is not a Ray dashboard's"):
            check_versions(JobServer(played.url))


def test_a_run_in_use_is_one_that_lives_and_has_the_same_folder():
    with PlayedServer(ray.__version__, PYTHON) as played:
        played.jobs = {"a-1": Job("SUCCEEDED", metadata={"run_dir": "/runs/a"}), "b-1": Job(metadata={"run_dir": "/runs/b"}),
                       "plain": Job(), "b-2": Job("PENDING", metadata={"run_dir": "/other/b"})}
        server = JobServer(played.url)
        assert running(server, "/runs/a") is None
        assert running(server, "/runs/b").submission_id == "b-1"
        assert running(server, "/other/b").submission_id == "b-2"


def test_a_driver_that_was_not_submitted_is_not_a_job_to_follow_or_stop():
    """Its metadata give the directory too; the run's own lock keeps a second run out."""
    driver = SimpleNamespace(submission_id=None, status=JobStatus.RUNNING, metadata={"run_dir": "/runs/a"})
    submitted = SimpleNamespace(submission_id="a-1", status=JobStatus.RUNNING, metadata={"run_dir": "/runs/a"})
    assert running(SimpleNamespace(ask=lambda call, what: [driver]), "/runs/a") is None
    assert running(SimpleNamespace(ask=lambda call, what: [driver, submitted]), "/runs/a") is submitted


def test_commands_carry_the_file_of_the_token_and_not_the_token(tmp_path):
    (tmp_path / "token").write_text("abc")
    command = find("http://head:8265", str(tmp_path / "token")).command("stop", "r-1")
    assert command == (f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={tmp_path}/token ray job stop --address http://head:8265 r-1")
    assert job_server.find("http://head:8265").command("stop", "r-1") == "ray job stop --address http://head:8265 r-1"


def test_a_detached_run_can_be_followed_watched_and_stopped(tmp_path):
    token = tmp_path / "token"
    token.write_text("a" * 64)
    lines = how_to(find("http://head:8265", str(token)), "my-run-20261203-053725").splitlines()
    known = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}"
    assert lines == [
        f"  follow: {known} ray job logs --follow --address http://head:8265 my-run-20261203-053725",
        f"  watch:  flowgrpo-ray status my-run --watch --address http://head:8265 --token-file {token}",
        f"  stop:   {known} ray job stop --address http://head:8265 my-run-20261203-053725"]
