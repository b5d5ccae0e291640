"""Ray nodes on this machine as processes of their own, with ports and a temporary directory that collide with nobody's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

COMMON = ["--block", "--disable-usage-stats", "--object-store-memory", str(128 * 2**20), "--dashboard-agent-listen-port"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ray_environment(**extra: str) -> dict[str, str]:
    """This process's variables without Ray's, with the modules of the tests, and the commands of this Python first."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    modules = [os.path.dirname(os.path.abspath(__file__)), *filter(None, [os.environ.get("PYTHONPATH")])]
    commands = [os.path.dirname(sys.executable), *filter(None, [os.environ.get("PATH")])]
    return {**clean, "PYTHONPATH": os.pathsep.join(modules), "PATH": os.pathsep.join(commands),
            "RAY_AUTH_MODE": "disabled",
            "RAY_raylet_start_wait_time_s": "120", **extra}  # a busy machine


def start_ray(command: list[str], environment: Mapping[str, str], cwd: Path | None = None) -> subprocess.Popen:
    """Run `ray start --block` in the background, in a working directory, and return once the node is up.

    Raises:
        RuntimeError: it ended instead, with all that it printed.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=dict(environment), cwd=cwd, start_new_session=True)
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                threading.Thread(target=process.stdout.read, daemon=True).start()
                return process
        raise RuntimeError("".join(said))
    except BaseException:  # a test's timeout too
        process.terminate()
        raise


@contextlib.contextmanager
def running(command: list[str], log: Path, **options: object) -> Iterator[subprocess.Popen]:
    """A process that writes to a file and ends with the block, at the latest by SIGKILL."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Nodes:
    """The nodes of one cluster; `extra` are environment variables of theirs.

    Attributes:
        folder: Ray's temporary directory (RAY_TMPDIR); short, as Ray puts sockets into it.
        address: of the head.
    """

    def __init__(self, **extra: str) -> None:
        self._extra = extra
        self.folder = Path(tempfile.mkdtemp(prefix="fgn", dir="/tmp"))
        self.address = f"127.0.0.1:{free_port()}"
        self._processes: list[psutil.Process] = []
        self._commands: list[subprocess.Popen] = []

    def environment(self) -> dict[str, str]:
        """For commands that would find this cluster by themselves, if they looked for one."""
        return ray_environment(RAY_TMPDIR=str(self.folder), **self._extra)

    def start_head(self, num_cpus: int, dashboard_port: int | None = None) -> None:
        dashboard = (["--include-dashboard", "false"] if dashboard_port is None else
                     ["--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)])
        self._start("--head", "--port", self.address.split(":")[1], *dashboard,
                    "--ray-client-server-port", str(free_port()), "--num-cpus", str(num_cpus))
        self._logs = (self.folder / "ray" / "session_latest").resolve() / "logs"

    def add(self, num_cpus: int, **labels: str) -> subprocess.Popen:
        """One more node, with a temporary directory and an address of its own."""
        folder = self.folder / f"n{len(self._commands)}"
        return self._start("--address", self.address, "--num-cpus", str(num_cpus), "--temp-dir", str(folder),
                           *(["--labels", ",".join(f"{key}={value}" for key, value in labels.items())] if labels else []),
                           host=len(self._commands) + 1)

    @staticmethod
    def kill(node: subprocess.Popen) -> None:
        """As a machine dies: its raylet and all that it has started, without a word."""
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    @staticmethod
    def kill_raylet(node: subprocess.Popen) -> None:
        """As the kernel does when memory runs out: the rest of the node sees it, and reports it before it ends too."""
        next(each for each in psutil.Process(node.pid).children(recursive=True) if each.name() == "raylet").kill()

    def _start(self, *args: str, host: int = 1) -> subprocess.Popen:
        command = [str(Path(sys.executable).parent / "ray"), "start", *args, *COMMON, str(free_port()), "--node-ip-address",
                   f"127.0.0.{host}"]
        self._commands.append(start_ray(command, self.environment()))
        return self._commands[-1]

    def drivers(self) -> int:
        """How many drivers have ever connected: each leaves a log of its own on the head."""
        return len(list(self._logs.glob("python-core-driver-*")))

    def alive(self) -> bool:
        return all(command.poll() is None for command in self._commands)

    def stop(self) -> None:
        """End the nodes, and nothing but their own processes."""
        for command in reversed(self._commands):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes += psutil.Process(command.pid).children(recursive=True)
            command.send_signal(signal.SIGTERM)
        for command in self._commands:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(timeout=20)
            command.kill()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def cluster(num_cpus: int, **extra: str) -> Iterator[Nodes]:
    """A cluster of one node; it ends with the block. `extra`: environment variables of its processes."""
    nodes = Nodes(**extra)
    try:
        nodes.start_head(num_cpus)
        yield nodes
    finally:
        nodes.stop()
