"""How soon a living run answers commands: on a node of its cluster, and through the dashboard.

    python -m benchmarks.commands [CONFIG] [KEY=VALUE ...] [--rounds 5] [--json]

A head is started on this machine, and a run on it. Every command is a process of its own, as a person gives it; told are the
seconds from its start to its answer.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import DEMO, ROOT, machine, parser, print_machine, print_table, run_main, split_words
from benchmarks.submit import head
from flowgrpo_ray.errors import FlowGrpoError

NAME = "commanded"
COMMANDS = {"runs": ["runs"], "status": ["status", NAME], "scale": ["scale", NAME]}


def command(args: Sequence[str], address: str, environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "flowgrpo_ray.cli", *args, "--address", address], cwd=ROOT, text=True,
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def seconds(args: Sequence[str], address: str, environment: dict[str, str]) -> float:
    """Of one command.

    Raises:
        FlowGrpoError: it failed; with what it printed.
    """
    started = time.monotonic()
    process = command(args, address, environment)
    answer = process.stdout.readline()
    answered = time.monotonic() - started
    rest, _ = process.communicate()
    if process.returncode:
        raise FlowGrpoError(f"{' '.join(args)} failed:\n{answer}{rest}")
    return answered


def measured(options: argparse.Namespace) -> dict[str, Any]:
    found = machine()
    config, overrides = split_words(options.words)
    with tempfile.TemporaryDirectory() as folder, head() as (url, address, environment):
        words = ["train", config or str(DEMO), f"run.dir={folder}", f"run.name={NAME}", "run.steps=100000", *overrides]
        run, said = command(words, address, environment), []
        for line in run.stdout:
            said.append(line)
            if re.search(r"\bstep +1/", line):
                break
        else:
            raise FlowGrpoError(f"the run failed:\n{''.join(said)}")
        ways: dict[str, dict[str, float]] = {}
        for way, where in (("on a node", address), ("through the dashboard", url)):
            for name, args in COMMANDS.items():
                times = []
                for round_ in range(options.rounds):
                    target = [options.scale.format(1 + round_ % 2)] if name == "scale" else []
                    times.append(seconds([*args, *target], where, environment))
                ways.setdefault(name, {})[way] = statistics.median(times)
        seconds(["stop", NAME, "--now"], address, environment)
        run.communicate()
    return {"machine": found, "seconds": ways}


def show(result: dict[str, Any]) -> None:
    print_machine(result["machine"])
    ways = list(next(iter(result["seconds"].values())))
    print_table(("command", *(f"{way}, s" for way in ways)),
                [(name, *(f"{times[way]:.2f}" for way in ways)) for name, times in result["seconds"].items()])


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--scale", default="reward.ocr={}", help="what is scaled; {} stands for 1 and 2 in turn")
    return run_main(measured, p, show, argv)


if __name__ == "__main__":
    sys.exit(main())
