"""From `flowgrpo-ray submit` to the first line of the run's log, and the size of what is uploaded.

    python -m benchmarks.submit [CONFIG] [KEY=VALUE ...] [--rounds 3] [--address http://HOST:8265] [--json]

Without --address a head is started on this machine for it, with ports and a folder of its own. Every round is a run of one
step in a process of its own, as a person submits it. Seconds are since that process began; the first round's upload is the
only one, as equal packages are uploaded once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import DEMO, ROOT, machine, parser, print_machine, print_table, run_main, split_words
from flowgrpo_ray.errors import FlowGrpoError

MARKS = {  # by the line that shows it
    "package is made": r"^package: ", "submitted": r"^submitted ", "job's command runs": r"^Running entrypoint ",
    "first line of the run's log": r"\brun \S+: \d+ steps? of ", "first step": r"\bstep +1/1\b.* images/s", "end": None}


@contextmanager
def head() -> Iterator[tuple[str, str, dict[str, str]]]:
    """A Ray head on this machine: (its dashboard, its own address, environment of commands that use it)."""
    folder = tempfile.mkdtemp(prefix="fgs", dir="/tmp")  # short: Ray puts sockets into it
    ports = [_free_port() for _ in range(4)]
    here = Path(sys.executable).parent
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {
        "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}
    command = [str(here / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus", "8",
               "--node-ip-address", "127.0.0.1", "--port", str(ports[0]), "--ray-client-server-port", str(ports[1]),
               "--dashboard-agent-listen-port", str(ports[2]), "--include-dashboard", "true", "--dashboard-port", str(ports[3])]
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
                           start_new_session=True)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise FlowGrpoError("Ray did not start:\n" + "".join(said))
        time.sleep(5)  # the head's agents are still starting
        yield f"http://127.0.0.1:{ports[3]}", f"127.0.0.1:{ports[0]}", environment
    finally:
        left = []
        with suppress(psutil.NoSuchProcess):
            left = process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        for one in psutil.wait_procs([process, *left], timeout=20)[1]:
            one.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def one_round(words: Sequence[str], address: str, environment: dict[str, str]) -> dict[str, Any]:
    """Seconds by mark, and the package as the command reports it.

    Raises:
        FlowGrpoError: the run failed; with what it printed.
    """
    config, overrides = split_words(words)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flowgrpo_ray.cli", "submit", config or str(DEMO), f"run.dir={folder}",
                   "run.name=submitted", "run.steps=1", "eval.at_start=false", "eval.at_end=false", *overrides,
                   "--address", address]
        started, marks, said = time.monotonic(), {}, []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                                   env=environment)
        for line in process.stdout:
            now = time.monotonic() - started
            said.append(line)
            for what, pattern in MARKS.items():
                if pattern and what not in marks and re.search(pattern, line):
                    marks[what] = now
        code = process.wait()
        marks["end"] = time.monotonic() - started
    package = re.search(r"^package: (.+), (\d+) files?, with (.+)$", "".join(said), re.MULTILINE)
    if code or package is None or "first line of the run's log" not in marks:
        raise FlowGrpoError(f"the run failed (exit code {code}):\n{''.join(said)}")
    return {"marks": marks, "package": {"size": package[1], "files": int(package[2]), "code": package[3]}}


def package_without_model() -> dict[str, Any]:
    """Size of the package of a run whose model is on the cluster: what a run of real size uploads."""
    from flowgrpo_ray.cluster.submit import load_for_job, prepare

    ready = prepare(load_for_job(str(DEMO), ["run.dir=s3://bucket/runs", "model.path=/models/real"], None))
    with tempfile.TemporaryDirectory() as folder:
        size = ready.package.write(Path(folder) / "package.zip")
    return {"bytes": size, "files": len(ready.package.files)}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    found = machine()
    if options.address:
        rounds = [one_round(options.words, options.address, dict(os.environ)) for _ in range(options.rounds)]
    else:
        with head() as (address, _, environment):
            rounds = [one_round(options.words, address, environment) for _ in range(options.rounds)]
    marks = {what: statistics.median(r["marks"][what] for r in rounds) for what in MARKS if what in rounds[0]["marks"]}
    return {"machine": found, "rounds": rounds, "marks": marks, "package": rounds[0]["package"],
            "package_without_demo_model": package_without_model()}


def show(result: dict[str, Any]) -> None:
    print_machine(result["machine"])
    print_table(("reached", "seconds"), [(what, f"{seconds:.2f}") for what, seconds in result["marks"].items()])
    package, real = result["package"], result["package_without_demo_model"]
    print(f"\npackage: {package['size']}, {package['files']} files, with {package['code']}; without the demo model "
          f"{real['bytes'] / 2**20:.2f} MiB, {real['files']} files")


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--address", help="dashboard of a cluster that sees this machine's temporary folder")
    return run_main(measured, p, show, argv)


if __name__ == "__main__":
    sys.exit(main())
