"""Commands to living runs: `runs`, `status`, `scale`, `checkpoint`, `stop`. Each returns the exit code."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from flowgrpo_ray import signals
from flowgrpo_ray.cluster import reach
from flowgrpo_ray.cluster.reach import GoneError, Run
from flowgrpo_ray.cluster.show import runs_text, status_text
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.views.status import RunStatus

Say = Callable[[str], None]

WATCH_EVERY_S = 2.0


def runs(address: str | None, say: Say, *, as_json: bool = False) -> int:
    """The living runs of a cluster."""
    with reach.connected(address):
        found = [run.status for run in reach.living()]
    say(json.dumps([status.to_json() for status in found], indent=2) if as_json else runs_text(found))
    return 0


def status(address: str | None, name: str, say: Say, *, as_json: bool = False, watch: bool = False) -> int:
    """The state of a run; with `watch` again and again until it ends."""
    with reach.connected(address, name):
        run = reach.find(reach.full_name(name))
        if not watch:
            say(_text(run.status, run.age_s, as_json, indent=2))
        elif as_json or not sys.stdout.isatty():
            _watch(run, lambda status, age: say(_text(status, age, as_json) + ("" if as_json else "\n")))
        else:
            _watch_screen(run)
    return 0


def scale(address: str | None, name: str, targets: Sequence[str], say: Say) -> int:
    """Give pools of a run another number of actors.

    Raises:
        ConfigError: a target is not of the form POOL=NUMBER.
    """
    wanted = parse_targets(targets)
    return _command(address, name, "scale", {"targets": wanted}, say)


def checkpoint(address: str | None, name: str, say: Say) -> int:
    """Have a run write a checkpoint, and wait for it."""
    return _command(address, name, "checkpoint", {}, say)


def stop(address: str | None, name: str, say: Say, *, now: bool = False) -> int:
    """Stop a run after the step in progress, or `now`, and wait for its end."""
    return _command(address, name, "stop", {"now": now}, say, ends=True)


def parse_targets(targets: Sequence[str]) -> dict[str, int]:
    """`rollout=8 reward.ocr=4` as numbers by pool."""
    wanted: dict[str, int] = {}
    for text in targets:
        pool, equals, number = text.partition("=")
        if not (pool and equals and number.lstrip("-").isdecimal()):
            raise ConfigError(f"{text!r}: expected POOL=NUMBER, for example rollout=8 or reward.ocr=4")
        if pool in wanted:
            raise ConfigError(f"{pool} is given twice")
        wanted[pool] = int(number)
    if not wanted:
        raise ConfigError("nothing to scale: give POOL=NUMBER, for example rollout=8 reward.ocr=4")
    return wanted


def _command(address: str | None, name: str, command: str, args: dict[str, Any], say: Say, *, ends: bool = False) -> int:
    """`ends`: a run that goes away after its first reply is what was wanted."""
    heard = False

    def hear(text: str) -> None:
        nonlocal heard
        heard = True
        say(text)

    with reach.connected(address, name):
        run = reach.find(reach.full_name(name))
        try:
            return reach.ask(run, command, args, hear)
        except GoneError:
            if ends and heard:
                say("the run has ended")
                return 0
            raise


# Watching -------------------------------------------------------------------------------------------------------------

def _text(status: RunStatus, age_s: float, as_json: bool, indent: int | None = None) -> str:
    return json.dumps(status.to_json(), indent=indent) if as_json else status_text(status, age_s)


def _watch(run: Run, show: Callable[[RunStatus, float], None]) -> None:
    """Show the status every two seconds until the run ends, and its last one."""
    import ray

    show(run.status, run.age_s)
    client = uuid.uuid4().hex
    last, end = run.status, run.actor.ended.remote(client)
    try:
        while True:
            deadline = time.monotonic() + WATCH_EVERY_S
            try:
                while not ray.wait([end], timeout=0.25)[0]:
                    signals.check()
                    if time.monotonic() >= deadline:
                        break
                else:
                    show(RunStatus.from_json(ray.get(end, timeout=5)), 0.0)
                    return
                tree, age_s = ray.get(run.actor.status.remote(), timeout=10)
            except ray.exceptions.RayActorError:
                try:
                    run = reach.find(last.run_id)
                except GoneError:
                    show(RunStatus.from_json({**last.to_json(), "phase": "ended", "waiting_for": "the run is gone"}), 0.0)
                    return
                end = run.actor.ended.remote(client)
                continue
            last = RunStatus.from_json(tree)
            show(last, age_s)
    finally:
        reach.goodbye(run.actor, client)


def _watch_screen(run: Run) -> None:
    """The same in a terminal, in one place of it."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        _watch(run, lambda status, age_s: live.update(Text(status_text(status, age_s)), refresh=True))
