"""Signals that end a command end it, whatever the main thread is at. In processes of their own: the handlers are for good."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from flowgrpo_ray import signals
from flowgrpo_ray.cli.main import _Group
from flowgrpo_ray.errors import FlowGrpoError

PREPARE = "import os, signal, sys\nfrom flowgrpo_ray import signals\nsignals.install()\nme = os.getpid()\n"
IN_A_DESTRUCTOR = PREPARE + """
class Swallows:
    def __del__(self):
        os.kill(me, signal.{name})
        for _ in range(1000):
            pass

signals.check()
Swallows()
print("still here", flush=True)
signals.check()
print("too far")
"""
IN_A_REWARD = PREPARE + """
from flowgrpo_ray.rewards.base import no_exit
with no_exit("mine"):
    os.kill(me, signal.SIGTERM)
    for _ in range(1000):
        pass
print("too far")
"""

IN_NATIVE_CODE = PREPARE + """
import hashlib, threading
signals.DEAF_S = 0.5
threading.Timer(0.2, os.kill, (me, signal.SIGTERM)).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # an hour
print("too far")
"""


OBEYED = PREPARE + """
class Swallows:
    def __del__(self):
        os.kill(me, signal.SIGTERM)
        for _ in range(1000):
            pass

try:
    os.kill(me, signal.SIGTERM)
    while True:
        pass
except SystemExit:
    with signals.finishing():
        signals.check()
        print("obeyed", signals.insisted(), flush=True)
    try:
        signals.check()
    except SystemExit:
        print("remembered", flush=True)
    with signals.finishing():
        Swallows()
        print(signals.insisted(), flush=True)
        signals.check()
        print("too far")
"""


def outcome(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("name", "code"), [("SIGINT", -signal.SIGINT), ("SIGTERM", 143)])
def test_a_signal_that_a_destructor_swallows_is_raised_again(name, code):
    returned, out, err = outcome(IN_A_DESTRUCTOR.format(name=name))
    assert "Exception ignored in" in err, "it was swallowed once"
    assert (returned, out) == (code, "still here\n")


def test_a_signal_in_the_code_of_a_reward_is_no_failure_of_the_reward():
    assert outcome(IN_A_REWARD) == (143, "", "")


def test_a_signal_ends_native_code_that_does_not_return():
    assert outcome(IN_NATIVE_CODE) == (143, "", "ended in the middle of a call of a library that did not return\n")


@pytest.mark.parametrize(("number", "code"), [(None, 1), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_fails_on_the_way_out_does_not_hide_the_signal(number, code, monkeypatch):
    app = typer.Typer(cls=_Group)

    @app.command()
    def go() -> None:
        monkeypatch.setattr(signals, "_received", number)
        raise FlowGrpoError("the store does not answer")

    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["go"])
    assert result.exit_code == code and "the store does not answer" in result.stderr


def test_while_a_signal_is_obeyed_only_another_one_counts():
    returned, out, _ = outcome(OBEYED)
    assert (returned, out) == (143, "obeyed False\nremembered\nTrue\n")
