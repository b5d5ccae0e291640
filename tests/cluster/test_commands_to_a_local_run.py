"""Commands to a run that has started a Ray of its own on this machine, from another terminal of its user."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from command import start, write_config

from flowgrpo_ray.run_dir.checkpoint import latest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

TOKEN = "0123456789abcdef" * 4


def address_of_ray(training: subprocess.Popen) -> str:
    """Of the head that a run has started; this machine may have others."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert training.poll() is None, training.communicate()
        for process in psutil.Process(training.pid).children(recursive=True):
            if process.name() == "raylet":
                return next(word.partition("=")[2] for word in process.cmdline() if word.startswith("--gcs-address="))
        time.sleep(0.2)
    raise TimeoutError("the run has started no Ray")


@pytest.mark.parametrize("own_token", [False, True], ids=["a token of the run's", "the user's token file"])
def test_a_local_run_is_seen_and_stopped_from_another_terminal(tmp_path, own_token):
    environment = {}
    if own_token:
        (tmp_path / "home" / ".ray").mkdir(parents=True)
        (tmp_path / "home" / ".ray" / "auth_token").write_text(TOKEN)
        environment["RAY_AUTH_MODE"] = "token"
    training = start(tmp_path, "train", write_config(tmp_path), "run.steps=5000", **environment)
    address = address_of_ray(training)

    def told(*args: str, code: int = 0) -> str:
        process = start(tmp_path, *args, "--address", address, **environment)
        out, err = process.communicate(timeout=200)
        assert process.returncode == code, (out, err, training.poll())
        assert "Traceback" not in out + err and (err == "" or code), err
        return out + err

    deadline = time.monotonic() + 200
    while "small" not in (listed := told("runs")):
        assert time.monotonic() < deadline, listed
    assert str(tmp_path / "runs" / "small") in listed
    assert json.loads(told("status", "small", "--json"))["run_dir"] == str(tmp_path / "runs" / "small")
    assert "no run 'smal' answers; the runs that answer here are small" in told("status", "smal", code=1)
    last = told("stop", str(Path("runs") / "small")).splitlines()[-1]
    assert last.startswith("stopped on request at step ")
    out, err = training.communicate(timeout=200)
    assert training.returncode == 0 and out.splitlines()[-1].endswith(last), (out, err)
    assert latest(str(tmp_path / "runs" / "small")).step >= 1
    written = "".join(path.read_text() for path in (tmp_path / "home").rglob("auth_token"))
    assert written == (TOKEN if own_token else ""), "no token is written for the user"
