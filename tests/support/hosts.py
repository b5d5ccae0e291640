"""Machines of one cluster on this machine: network namespaces on a bridge, each with its address.

They share file system, process table and /dev/shm, and nothing of the network: every address is a
real one, ports are Ray's own, and no packet leaves the bridge. Each has a temporary directory of its
own. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from clusters import start_ray

NETWORK = "10.231.7"  # known on the bridge alone, so that clusters of other tests may use it too
RAY = str(Path(sys.executable).parent / "ray")
STORE = ("--object-store-memory", str(80 * 2**20))  # of /dev/shm, which all hosts share


def ip(*args: str) -> str:
    """iproute2's command; what it printed."""
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_not() -> str | None:
    """Why there can be no hosts on this machine (the reason of a skipped test), or None."""
    if not shutil.which("ip"):
        return "network namespaces need iproute2 (ip)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"fgh{secrets.token_hex(3)}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
    except RuntimeError as error:
        return f"no network namespaces here: {error}"
    finally:
        with contextlib.suppress(RuntimeError):
            ip("netns", "del", name)
    return None


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: as it was added.
        namespace: of its network.
        address: on the bridge.
        folder: Ray's temporary directory on it; short, as Ray puts sockets into it.
    """

    name: str
    namespace: str
    address: str
    folder: Path

    @property
    def gcs(self) -> str:
        """Where nodes and drivers connect to, if this is a head."""
        return f"{self.address}:6379"

    @property
    def dashboard(self) -> str:
        """Where jobs are submitted to, if this is a head."""
        return f"http://{self.address}:8265"


def label_text(labels: Mapping[str, str]) -> str:
    """Node labels as `ray start` takes them."""
    return ",".join(f"{key}={value}" for key, value in labels.items())


class Hosts:
    """The machines, and what runs on them.

    Args:
        environment: variables of everything that is started.
        working_dir: where Ray's nodes are started, and so where jobs run that bring no directory.
    """

    def __init__(self, environment: Mapping[str, str], working_dir: Path | None = None) -> None:
        self.environment = dict(environment)
        self.working_dir = working_dir
        self.prefix = f"fgh{secrets.token_hex(3)}"
        self.hosts: dict[str, Host] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="fgh", dir="/tmp"))
        self._switch = f"{self.prefix}-switch"
        self._commands: list[subprocess.Popen] = []
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
        except RuntimeError:
            self.close()
            raise

    def add(self, name: str) -> Host:
        """A machine that runs nothing yet."""
        number = len(self.hosts) + 1
        host = Host(
            name, f"{self.prefix}-{name}", f"{NETWORK}.{number}", self._folder / str(number)
        )
        host.folder.mkdir()
        self.hosts[name] = host
        ip("netns", "add", host.namespace)
        port = f"port{number}"
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            host.namespace,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            self._switch,
        )
        ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", host.namespace, "link", "set", device, "up")
        # Whoever asks for this machine's address looks for the way out of the network.
        ip("-n", host.namespace, "route", "add", "default", "dev", "eth0")
        return host

    def start_head(self, name: str = "head") -> Host:
        """Add a machine with Ray's head; it has no CPUs for actors, as in the manifests."""
        return self.start(
            {name: ["--head", "--dashboard-host", "0.0.0.0", "--num-cpus", "0", *STORE]}
        )[0]

    def start_workers(
        self, head: Host, workers: Mapping[str, tuple[int, Mapping[str, str]]]
    ) -> list[Host]:
        """Add machines, each by name with its CPUs and labels, that join the cluster of `head`."""
        return self.start(
            {
                name: [
                    "--address",
                    head.gcs,
                    "--num-cpus",
                    str(num_cpus),
                    "--labels",
                    label_text(labels),
                    *STORE,
                ]
                for name, (num_cpus, labels) in workers.items()
            }
        )

    def start(
        self, nodes: Mapping[str, Sequence[str]], environment: Mapping[str, str] | None = None
    ) -> list[Host]:
        """Add machines, each with a Ray node that gets these arguments; return once all are up."""
        added = [self.add(name) for name in nodes]
        variables = {**self.environment, **(environment or {})}

        def up(host: Host) -> None:
            command = [
                RAY,
                "start",
                "--block",
                "--disable-usage-stats",
                "--temp-dir",
                str(host.folder),
                "--node-ip-address",
                host.address,
                *nodes[host.name],
            ]
            self._commands.append(start_ray(self.on(host, command), variables, self.working_dir))

        with ThreadPoolExecutor(len(added)) as threads:
            list(threads.map(up, added))
        return added

    @staticmethod
    def on(host: Host, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a machine."""
        return ["ip", "netns", "exec", host.namespace, *command]

    def popen(self, host: Host, command: Sequence[str], **options: object) -> subprocess.Popen:
        """Start a command on a machine; it ends with the machine at the latest."""
        process = subprocess.Popen(
            self.on(host, command), env=self.environment, start_new_session=True, **options
        )
        self._commands.append(process)
        return process

    def run(
        self, host: Host, command: Sequence[str], timeout_s: float = 60, **options: object
    ) -> subprocess.CompletedProcess:
        """A command on a machine, with its output as text."""
        return subprocess.run(
            self.on(host, command),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **options,
        )

    def kill(self, host: Host) -> None:
        """SIGKILL to every process of a machine.

        Its network stays up, so others see closed connections at once; one that vanishes from the
        network is missed by Ray's health check, after a minute.
        """
        deadline = time.monotonic() + 30
        while pids := processes(host.namespace):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of {host.namespace} outlive SIGKILL: {pids}")
            time.sleep(0.05)

    def close(self) -> None:
        """End all that runs on the machines, then the machines; one failure does not keep the rest."""
        errors = []
        for host in self.hosts.values():
            try:
                self.kill(host)
            except (RuntimeError, OSError) as error:
                errors.append(error)
        for command in self._commands:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(timeout=10)
        for namespace in [*(host.namespace for host in self.hosts.values()), self._switch]:
            try:
                if namespace in namespaces():
                    ip("netns", "del", namespace)  # with its end of each pair, and so the pair
            except RuntimeError as error:
                errors.append(error)
        shutil.rmtree(self._folder, ignore_errors=True)
        if errors:
            raise RuntimeError("; ".join(map(str, errors)))


def namespaces() -> list[str]:
    """Names of the network namespaces of this machine."""
    return [line.split()[0] for line in ip("netns", "list").splitlines()]


def processes(namespace: str) -> list[int]:
    """Processes that live in a network namespace; of one that is gone: none."""
    return (
        [int(pid) for pid in ip("netns", "pids", namespace).split()]
        if namespace in namespaces()
        else []
    )


@contextlib.contextmanager
def hosts(environment: Mapping[str, str], working_dir: Path | None = None) -> Iterator[Hosts]:
    """Machines that are gone with the block, with all that runs on them, however it ends."""
    made = Hosts(environment, working_dir)
    try:
        yield made
    finally:
        made.close()
