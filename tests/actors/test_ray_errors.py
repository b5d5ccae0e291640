"""Why Ray cannot be started or reached, as a person is told: cause and remedy. Errors are Ray's own wherever it can be had."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from clusters import cluster
from command import write_config
from ray._private.utils import check_version_info, validate_socket_filepath
from ray.exceptions import AuthenticationError

from actors import head
from actors.ray_errors import cannot_connect, cannot_start
from flowgrpo_ray.errors import DeadlineError


def raised(call, *args) -> Exception:
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_too_long_temporary_path_names_the_way_out():
    path = "/tmp/" + "x" * 100 + "/ray/session_1/sockets/plasma_store"
    text = str(cannot_start(raised(validate_socket_filepath, path)))
    assert path in text and "at most 107 bytes. Set RAY_TMPDIR to a folder with a shorter path" in text


def test_folder_of_another_user_is_named_with_its_owner(tmp_path, monkeypatch):
    error = PermissionError(13, "Permission denied", str(tmp_path / "ray" / "session_1"))
    assert "belongs to" not in str(cannot_start(error))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    text = str(cannot_start(error))
    assert f"{tmp_path}/ray/session_1 cannot be written: Permission denied ({tmp_path} belongs to user " in text
    assert "Set RAY_TMPDIR to a folder of your own with a short path, for example RAY_TMPDIR=/tmp/12345" in text


def test_any_other_failure_to_start_names_the_logs(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/fast")
    assert str(cannot_start(RuntimeError("Failed to start GCS"))) == (
        "Ray cannot be started on this machine: RuntimeError: Failed to start GCS; Ray's logs are in the folder "
        "/fast/ray/session_latest/logs")


@pytest.mark.parametrize(("theirs", "minor"), [("3.11.99", True), ("3.9.1", False)])
def test_other_versions_on_the_cluster_are_named(theirs, minor, monkeypatch):
    import ray

    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    versions = {"ray_version": ray.__version__, "python_version": theirs}
    text = str(cannot_connect(raised(check_version_info, versions, "node"), "head:6379"))
    assert f"it runs Ray {ray.__version__} on Python {theirs}, and this command Ray {ray.__version__} on Python 3.11" in text
    assert "ray job submit" in text and ("MATCH_LEVEL=minor" in text) == minor


def test_missing_token_says_where_a_token_goes():
    text = str(cannot_connect(AuthenticationError("Token authentication is enabled but no authentication token was found"),
                              "head:6379"))
    assert "RAY_AUTH_MODE is token, and no token was found. Set RAY_AUTH_MODE=token, and the cluster's token in" in text


@pytest.mark.parametrize(("error", "what"), [
    (ConnectionError("Failed to connect to Ray cluster at head:6379"), "no Ray answers there. Is the cluster up"),
    (ConnectionError("nothing takes connections there: refused"), "connections there: refused. Is the cluster up"),
    (DeadlineError("no answer within 60 s"), "RAY_ADDRESS): no answer within 60 s")])
def test_cluster_that_does_not_answer_is_asked_after(error, what):
    assert what in str(cannot_connect(error, "head:6379"))


@pytest.mark.parametrize(("environment", "kept"), [
    ({}, False), ({"RAY_AUTH_MODE": "token"}, False), ({"RAY_AUTH_MODE": "disabled"}, True), ({"RAY_AUTH_TOKEN": "mine"}, True),
    ({"RAY_AUTH_TOKEN_PATH": "/a/file"}, True)])
def test_ray_started_here_gets_a_token_that_is_not_kept(environment, kept, tmp_path, monkeypatch):
    for key in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(key, raising=False)
        if key in environment:
            monkeypatch.setenv(key, environment[key])
    monkeypatch.setenv("HOME", str(tmp_path))
    token = head._give_token()
    assert (token == "") == kept and os.environ.get("RAY_AUTH_TOKEN", "") == (environment.get("RAY_AUTH_TOKEN") or token)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    assert list(tmp_path.iterdir()) == []


def test_token_of_the_user_is_used(tmp_path, monkeypatch):
    for key in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a" * 32)
    assert head._give_token() == "" and "RAY_AUTH_TOKEN" not in os.environ


def command(tmp_path, *args: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    config = write_config(tmp_path, eval={"at_start": False, "at_end": False})
    return subprocess.run([sys.executable, "-m", "flowgrpo_ray.cli", "train", config, "run.steps=1", *args], cwd=tmp_path,
                          capture_output=True, text=True, timeout=240, env={**clean, **environment})


def test_command_that_cannot_start_ray_says_why(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    done = command(tmp_path, RAY_TMPDIR=str(folder), HOME=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: Ray cannot be started on this machine: the path of its temporary folder is too long" in done.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir()), "the run's claim is given back"


@pytest.mark.slow
def test_command_names_the_token_that_a_cluster_wants(tmp_path):
    with cluster(num_cpus=1, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 32) as nodes:
        quick = {"HOME": str(tmp_path), "RAY_NUM_REDIS_GET_RETRIES": "2"}
        for environment, what in [
            ({}, "an authentication token, and none was sent, as RAY_AUTH_MODE is not token"),
            ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE is token, and no token was found"),
            ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 32}, "another authentication token than the one"),
        ]:
            done = command(tmp_path, "--address", nodes.address, **quick, **environment)
            assert done.returncode == 1 and "Traceback" not in done.stderr
            assert f"error: cannot connect to Ray at {nodes.address}" in done.stderr and what in done.stderr, done.stderr
