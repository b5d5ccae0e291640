"""One driver at a time writes into a run.

The file `driver.json` names the one that has, or wants, the run. A holder on this machine is alive or dead, and its process
says which. Of a holder elsewhere nobody can tell for sure: it counts up in `driver.beat`, and a newcomer that sees the count
change leaves the run to it; one that sees no change for `OBSERVED_S` of its own clock takes the run over. No two clocks are
compared. A newcomer changes nothing before its actors are up, so one that cannot start takes nothing away.

Object stores have no locks, so two may still go past each other. What decides is one file: the run is the driver's that was
the last to record itself in `run.json` (`opened_by`), and every other one stops at its next write. So of two drivers exactly
one lives on, in whatever order their reads and writes come.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flowgrpo_ray import signals, storage
from flowgrpo_ray.errors import CheckpointError, ConfigError, FlowGrpoError, ResumeError

log = logging.getLogger(__name__)

FILE, BEAT_FILE = "driver.json", "driver.beat"
BEAT_S = 10.0
OBSERVED_S = 35.0  # that a holder elsewhere must let pass without a beat before its run is taken over


@dataclass(frozen=True)
class _Other:
    """A driver elsewhere that holds the run, as it was when it was looked at."""

    id: str | None
    beat: int | None
    opened: bool  # it has come as far as to write into the run
    seen: float  # monotonic seconds


class Claim:
    """This driver's claim on a run, or its wish for one: `id` tells its starts apart.

    Args:
        run_dir: URI of the run's folder.
        opened_by: reads which driver was the last to `confirm` and record itself as the run's (None: nobody).

    Raises:
        ResumeError: another living process of this machine writes into the run.
        ConfigError: the folder cannot be written.
    """

    def __init__(self, run_dir: str, opened_by: Callable[[], str | None]) -> None:
        self.id = uuid.uuid4().hex
        self._run_dir, self._uri, self._opened_by = run_dir, storage.join(run_dir, FILE), opened_by
        self._stop, self._beating = threading.Event(), False
        self._other: _Other | None = None
        try:
            if not self._write_first():
                holder = _read(self._uri)
                if holder is None or not _may_live(holder, run_dir):
                    self._write()
                else:
                    self._other = self._look_at(holder)
        except OSError as error:
            raise ConfigError(f"run.dir: {storage.display(run_dir)} cannot be written: {error.strerror or error}") from error

    @property
    def takes_over(self) -> bool:
        """Whether the run is somebody else's until `confirm`."""
        return self._other is not None

    def confirm(self) -> None:
        """Hold the run from now on. While it is another's, waits: until that one has given up, or has let `OBSERVED_S` pass
        without a beat.

        Raises:
            ResumeError: the other lives, and is at work.
        """
        said = False
        while (found := _read(self._uri)) is not None and found.get("id") != self.id:
            if found.get("machine") == machine() and (found.get("pid") == os.getpid() or _is_alive(found)):
                raise self._taken_by(found)
            if self._other is None or found.get("id") != self._other.id:
                self._other = self._look_at(found)
            now, other = self._look_at(found), self._other
            if now.opened and (now.beat != other.beat or not other.opened):
                raise ResumeError(f"{storage.display(self._run_dir)} is being written by {_who(found)}, which is alive; "
                                      "wait for it, stop it, or choose another run.name")
            if now.beat != other.beat:  # it lives, and may yet fail to start
                self._other = other = now
            left = OBSERVED_S - (now.seen - other.seen)
            if left <= 0:
                break
            if not said:
                log.warning("%s was last written by %s; it is taken over if that shows no sign of life for %.0f s",
                            storage.display(self._run_dir), _who(found), left)
                said = True
            signals.check()
            time.sleep(min(1.0, left))
        if found is None or found.get("id") != self.id:
            self._write()
        self._other = None

    def check(self) -> None:
        """Raise CheckpointError where another driver has opened the run since. To be called before every write into it."""
        if self._opened_by() == self.id:
            return
        self._stop.set()
        found = _read(self._uri)
        raise self._taken_by(found if found and found.get("id") != self.id else None)

    def release(self) -> None:
        """Give the claim up, if it is held; a local folder with nothing else in it goes with it."""
        self._stop.set()
        found = _read(self._uri)
        if found is None or found.get("id") != self.id:
            return
        storage.delete_file(storage.join(self._run_dir, BEAT_FILE))
        storage.delete_file(self._uri)
        local = storage.local_path(self._run_dir)
        if local is not None:
            with suppress(OSError):  # not empty
                local.rmdir()

    def _write_first(self) -> bool:
        """Whether the claim could be made as the first: of two that start together on one machine, one makes the file."""
        local = storage.local_path(self._uri)
        if local is not None:
            local.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), open(local, "xb") as file:
                file.write(self._record())
                self._start_beating()
                return True
        return False

    def _write(self) -> None:
        storage.write_bytes(self._uri, self._record())
        self._start_beating()

    def _record(self) -> bytes:
        pid = os.getpid()
        return json.dumps({"id": self.id, "host": socket.gethostname(), "pid": pid, "machine": machine(),
                           "started": _started(pid)}).encode()

    def _start_beating(self) -> None:
        if BEAT_S and not self._beating:
            self._beating = True
            threading.Thread(target=_go_on_beating, args=(weakref.ref(self), self._stop), daemon=True).start()

    def beat(self, count: int) -> None:
        """Show that this driver lives. The claim of a newcomer that gave up, or its removal, makes way for this one's."""
        found = _read(self._uri)
        if (found is None or found.get("id") != self.id) and self._opened_by() == self.id and not self._stop.is_set():
            self._write()
        elif found is None or found.get("id") != self.id or self._stop.is_set():
            return
        storage.write_bytes(storage.join(self._run_dir, BEAT_FILE), json.dumps({"id": self.id, "beat": count}).encode())

    def _look_at(self, found: dict[str, Any]) -> _Other:
        beat = _read(storage.join(self._run_dir, BEAT_FILE)) or {}
        return _Other(found.get("id"), beat.get("beat") if beat.get("id") == found.get("id") else None,
                      self._opened_by() == found.get("id"), time.monotonic())

    def _taken_by(self, found: dict[str, Any] | None) -> CheckpointError:
        who = _who(found) if found else "somebody who removed its claim"
        return CheckpointError(f"{storage.display(self._run_dir)} has been taken over by {who}; this driver stops")


def _go_on_beating(of: weakref.ref[Claim], stop: threading.Event) -> None:
    for count in itertools.count(1):
        if stop.wait(BEAT_S) or (held := of()) is None:
            return
        with suppress(OSError, FlowGrpoError):  # a store that is away for a while
            held.beat(count)
        del held


def machine() -> str:
    """Where a process number means the same process: this start of this machine, and this container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{uuid.getnode():x}"


def _may_live(holder: dict[str, Any], run_dir: str) -> bool:
    """False for a dead process of this machine (and for this process itself), True for anybody elsewhere.

    Raises:
        ResumeError: a living process of this machine.
    """
    if holder.get("machine") != machine():
        return True
    if holder.get("pid") == os.getpid() or not _is_alive(holder):
        return False
    raise ResumeError(f"{storage.display(run_dir)} is being written by process {holder['pid']} of this machine; wait for "
                          "it, stop it, or choose another run.name")


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether a process of this machine is there: itself, and not a later one with its number."""
    return holder.get("started") is not None and _started(holder.get("pid")) == holder["started"]


def _started(pid: Any) -> float | None:
    """When a process was started, in ticks since the machine was; None for one that is not there. No wall clock is in it."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else float(fields[19])
    except (OSError, ValueError, TypeError, IndexError):
        pass
    try:
        return None if Path("/proc/self/stat").exists() else psutil.Process(int(pid)).create_time()
    except (psutil.Error, ValueError, TypeError):
        return None


def _read(uri: str) -> dict[str, Any] | None:
    if storage.size(uri) is None:
        return None
    try:
        found = json.loads(storage.read_bytes(uri))
        return found if isinstance(found, dict) else {}
    except ValueError:
        return {}
    except FileNotFoundError:  # since
        return None


def _who(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}"
