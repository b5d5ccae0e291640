"""From the command to the first sampled image: when each phase was over, and what it cost.

    python -m benchmarks.startup [CONFIG] [KEY=VALUE ...] [--rounds 3] [--json]

Every round is a `flowgrpo-ray train` of one step in a process of its own, as a person starts it. Told are the seconds since
that process began, and the CPU seconds until the first image by process: on a machine that does other things too only these
mean something.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import DEMO, ROOT, machine, parser, print_machine, print_table, run_main, split_words
from benchmarks.whole_step import cpu_by_role
from flowgrpo_ray.errors import FlowGrpoError

LAST = "first image"
# The command as its entry point starts it, with the marks of flowgrpo_ray.startup on standard error.
COMMAND = """
import logging, sys
logging.getLogger("flowgrpo_ray.startup").setLevel(logging.DEBUG)
handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(logging.Formatter("mark: %(message)s"))
logging.getLogger("flowgrpo_ray.startup").addHandler(handler)
from flowgrpo_ray.cli.main import main
sys.argv[0] = "flowgrpo-ray"
main()
"""


def one_round(words: Sequence[str]) -> dict[str, Any]:
    """Marks, in seconds, and CPU seconds by role until the first image.

    Raises:
        FlowGrpoError: the command failed; with what it said.
    """
    config, overrides = split_words(words)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", COMMAND, "train", config or str(DEMO), *overrides, f"run.dir={folder}",
                   "run.name=startup", "run.steps=1"]
        with open(Path(folder, "err"), "w+") as err:
            process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=err, cwd=ROOT)
            spent: dict[int, tuple[str, float]] = {}
            while process.poll() is None and f"mark: {LAST}" not in Path(err.name).read_text():
                spent |= {pid: (role, seconds) for (pid, role), seconds in cpu_by_role(process).items()}
                time.sleep(0.05)
            if process.poll() is None:
                process.terminate()  # what comes after the first image is of no interest
            process.wait()
            said = Path(err.name).read_text()
    if f"mark: {LAST}" not in said:
        raise FlowGrpoError(f"the command failed:\n{said}")
    roles: Counter[str] = Counter()
    for role, seconds in spent.values():
        roles[role] += seconds
    marks = {what: float(seconds) for what, seconds in re.findall(r"^mark: (.+): ([\d.]+) s$", said, re.MULTILINE)}
    return {"marks": marks, "cpu_seconds": dict(roles.most_common()), "processes": len(spent)}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    found = machine()
    rounds = [one_round(options.words) for _ in range(options.rounds)]
    phases = {what: statistics.median(r["marks"].get(what, 0.0) for r in rounds) for what in rounds[0]["marks"]}
    roles = {role: statistics.median(r["cpu_seconds"].get(role, 0.0) for r in rounds) for role in rounds[0]["cpu_seconds"]}
    return {"machine": found, "rounds": rounds, "marks": phases, "cpu_seconds": roles,
            "processes": statistics.median(r["processes"] for r in rounds)}


def show(result: dict[str, Any]) -> None:
    print_machine(result["machine"])
    print_table(("reached", "seconds"), [(what, f"{seconds:.2f}") for what, seconds in result["marks"].items()])
    print()
    print_table(("process", "CPU seconds"), [(role, f"{seconds:.2f}") for role, seconds in result["cpu_seconds"].items()])
    print(f"{sum(result['cpu_seconds'].values()):.2f} CPU seconds in {result['processes']:.0f} processes")


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=3)
    return run_main(measured, p, show, argv)


if __name__ == "__main__":
    sys.exit(main())
