"""Whole training steps on real actors, against plain loops in one process and in two, taking turns on this machine.

    python -m benchmarks.whole_step [CONFIG] [KEY=VALUE ...] [--variant "KEY=VALUE ..."]... [--rounds 3] [--steps 8]
                                    [--warmup 2] [--processes 2] [--view plain|live] [--json]

For the configuration as it is, and for every `--variant` (overrides on top, to compare placements, replicas,
micro-batches or niceness), Ray is started, `warmup` + `steps` steps are trained as `flowgrpo-ray train` does, and Ray
is ended. Told are

- the median time of a step, all between two recorded rows included (weight sync, metrics, samples);
- driver: CPU seconds of the driver's process a step (target: at most 0.15), with all of its threads;
- the busy share of the cores (target: at least 0.80): pure work / (cores x time of a step). Pure work is what
  denoising, decoding, scoring and training of one step cost in core-seconds when each is done alone:
  `benchmarks.baseline`, run first, in a process of its own, at the same shapes. What actors add (Ray, copies, waiting,
  a cache shared by two) is not work.
- where CPU time went, by process; the difference to pure work is overhead.
- the share of the cores that other programs took meanwhile: above a few percent the other figures mean little.

In every round plain loops and variants take turns, and the steps of all rounds are put together: the speed of a machine,
above all of a virtual one, comes and goes. Two ratios are printed, of medians: to the plain loop in one process, at the
same shapes, and to `benchmarks.data_parallel`, the same algorithm in `--processes` data-parallel processes at the shapes
of the published code (`--processes 0`: without). docs/benchmarks.md says what that leaves out.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from actors.controller import Controller
from actors.run import train
from benchmarks.baseline import summary
from benchmarks.measure import (
    DEMO,
    ROOT,
    cores,
    machine,
    parser,
    print_machine,
    print_table,
    run_main,
    shown,
    split_words,
    spread,
)
from flowgrpo_ray.config.load import Config, from_tree, load, to_yaml
from flowgrpo_ray.data.plan import StepPlan
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.views.live import LiveView, PlainView

DRIVER_TARGET, BUSY_TARGET = 0.15, 0.80
PARTS = {"RolloutActor": "sampling", "LearnerActor": "training", "ColocatedActor": "sampling and training",
         "RewardActor": "scoring"}  # of actors; other processes are Ray's own
SHARES = ("busy_share/rollout", "busy_share/reward", "busy_share/learner")


def only_steps(config: Config, folder: str, name: str, steps: int) -> Config:
    """The configuration with nothing but training steps: no evaluation, and no checkpoint before the end."""
    tree = config.model_dump(mode="json")
    tree["run"] |= {"name": name, "dir": folder, "steps": steps, "resume": "never"}
    tree["eval"] |= {"every_steps": 0, "at_start": False, "at_end": False}
    tree["checkpoint"] |= {"every_steps": 0}
    return from_tree(tree)


def sequential(config: Config, folder: str, *, steps: int, warmup: int) -> dict[str, Any]:
    """`benchmarks.baseline` in a process of its own."""
    return _in_process("baseline", config, folder, "--steps", str(steps), "--warmup", str(warmup))


def data_parallel(config: Config, folder: str, *, processes: int, steps: int, warmup: int) -> dict[str, Any]:
    """`benchmarks.data_parallel`, in processes of its own."""
    return _in_process("data_parallel", config, folder, "--processes", str(processes), "--steps", str(steps), "--warmup",
                       str(warmup))


def _in_process(name: str, config: Config, folder: str, *arguments: str) -> dict[str, Any]:
    """What another benchmark prints.

    Raises:
        FlowGrpoError: it failed; with what it said.
    """
    file = Path(folder, f"{name}.yaml")
    file.write_text(to_yaml(config))
    device = "cuda" if config.pools.learner.num_gpus else "cpu"
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", str(file), "--json", "--device", device,
               *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise FlowGrpoError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def cpu_by_role(of: psutil.Process | None = None) -> dict[tuple[int, str], float]:
    """CPU seconds so far by (pid, role): of every process that this one has started, or of `of` and those it has started."""
    out = {}
    for process in [of, *of.children(recursive=True)] if of is not None else psutil.Process().children(recursive=True):
        try:
            times, line = process.cpu_times(), process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # ended between the two calls
        out[(process.pid, role_of(line[0] if line else process.name()))] = times.user + times.system
    return out


def role_of(title: str) -> str:
    """What a process is, by its title: an actor's class, or a program's name."""
    if not title.startswith("ray::"):
        return Path(title).name
    title = title.removeprefix("ray::")
    if named := re.match(r"[^ ]+/(rollout|learner|reward)[-.]", title):  # in a call: `run/rollout-0 samples at version 3`
        return f"{named[1].capitalize()}Actor"
    return title.split(".")[0].split("(")[0]  # between calls, and in the constructor: Ray's title, the class


def spent(before: Mapping[tuple[int, str], float], after: Mapping[tuple[int, str], float]) -> dict[str, float]:
    """CPU seconds between two snapshots, by role; what a process is called at the end counts."""
    earlier = {pid: seconds for (pid, _), seconds in before.items()}
    total: Counter[str] = Counter()
    for (pid, role), seconds in after.items():
        total[role] += seconds - earlier.get(pid, 0.0)
    return dict(total.most_common())


def by_part(roles: Mapping[str, float], driver: float) -> dict[str, float]:
    """CPU seconds by process, put together by what the processes are for."""
    total = Counter({"driver": driver})
    for role, seconds in roles.items():
        total[PARTS.get(role, "Ray's processes")] += seconds
    return dict(total.most_common())


def all_busy() -> float:
    """CPU seconds of the whole machine so far, all programs (and, in a virtual machine, time that its host kept)."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - getattr(
        times, "guest_nice", 0.0)


class Marks:
    """Wall and CPU seconds of the driver after every recorded row, and what was spent between the measured ones."""

    def __init__(self, warmup: int, steps: int) -> None:
        self._warmup, self._steps = warmup, steps
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.rows: list[Row] = []
        self._before: tuple[dict[tuple[int, str], float], float] = ({}, 0.0)
        self.spent: dict[str, float] = {}  # by role
        self.all_spent = 0.0  # by the whole machine

    def begin(self) -> None:
        """Training starts: the first mark."""
        self._mark()

    def row(self, row: Row) -> None:
        done = len(self.rows) + 1
        if done == self._warmup:
            self._before = cpu_by_role(), all_busy()  # before the mark: not a part of the next step
            self._mark()
        else:
            self._mark()
            if done == self._warmup + self._steps:
                self.spent, self.all_spent = spent(self._before[0], cpu_by_role()), all_busy() - self._before[1]
        self.rows.append(row)

    def _mark(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def steps(self, marks: Sequence[float]) -> list[float]:
        """Differences of the measured steps."""
        return [b - a for a, b in zip(marks[self._warmup : -1], marks[self._warmup + 1 :], strict=True)]

    @property
    def others(self) -> float:
        """Core-seconds that other programs took during the measured steps."""
        own = sum(self.spent.values()) + sum(self.steps(self.cpu))
        return max(0.0, self.all_spent - own)


def run_actors(config: Config, *, steps: int, warmup: int, view: str) -> Marks:
    """Train on real actors, marking every step."""
    marks = Marks(warmup, steps)

    class Measured(Controller):
        def train_step(self, plan: StepPlan) -> Row:
            if not marks.wall:
                marks.begin()
            return super().train_step(plan)

        def _record(self, row: Row) -> None:
            super()._record(row)
            marks.row(row)

    console = Console(file=io.StringIO(), force_terminal=view == "live", width=120, height=40)
    with (LiveView if view == "live" else PlainView)(config, console) as observer:
        train(config, observer, controller_class=Measured)
    return marks


def figures(
    name: str, runs: Sequence[Marks], plain: Mapping[str, Any], apart: Sequence[Mapping[str, Any]], warmup: int
) -> dict[str, Any]:
    """Figures of one configuration from its runs; `plain` is the summary of its plain loop, `apart` the data-parallel
    results, one a round."""
    walls = [seconds for marks in runs for seconds in marks.steps(marks.wall)]
    cpus = [seconds for marks in runs for seconds in marks.steps(marks.cpu)]
    step, driver, steps = spread(walls), spread(cpus), len(walls)
    measured = [row for marks in runs for row in marks.rows[warmup:]]
    roles: Counter[str] = Counter()
    for marks in runs:
        roles.update(marks.spent)
    by_process = {role: seconds / steps for role, seconds in roles.most_common() if seconds / steps >= 0.005}
    return _against(apart, runs, step) | {
        "variant": name, "steps": steps, "images": plain["images"], "step_seconds": step,
        "images_per_s": plain["images"] / step["median"], "driver_cpu_seconds": driver,
        "pure_core_seconds": plain["pure_core_seconds"],
        "busy_share": plain["pure_core_seconds"] / (cores() * step["median"]),
        "role_shares": {key: spread([row[key] for row in measured])["median"] for key in SHARES},
        "cpu_seconds_by_process": by_process, "cpu_seconds_by_part": by_part(by_process, driver["median"]),
        "share_of_others": sum(marks.others for marks in runs) / (cores() * sum(walls)),
        "rounds": [{"step_seconds": spread(marks.steps(marks.wall)),
                    "share_of_others": marks.others / (cores() * sum(marks.steps(marks.wall)))} for marks in runs],
        "baseline_step_seconds": plain["step_seconds"]["median"],
        "speed_up": plain["step_seconds"]["median"] / step["median"], "baseline": plain,
    }


def _against(apart: Sequence[Mapping[str, Any]], runs: Sequence[Marks], step: Mapping[str, float]) -> dict[str, Any]:
    """Ratio to the data-parallel processes: of the medians of all steps, and of the medians of each round."""
    if not apart:
        return {}
    walls = spread([wall for result in apart for wall in result["walls"]])
    rounds = [result["step_seconds"]["median"] / spread(marks.steps(marks.wall))["median"]
              for result, marks in zip(apart, runs, strict=True)]
    return {"data_parallel_step_seconds": walls, "over_data_parallel": walls["median"] / step["median"],
            "over_data_parallel_by_round": rounds,
            "data_parallel_cpu_seconds": spread([result["cpu_seconds"]["median"] for result in apart])["median"]}


def measure(file: str | None, overrides: Sequence[str], variants: Sequence[str], *, steps: int, warmup: int,
            baseline_steps: int, rounds: int, processes: int, view: str) -> dict[str, Any]:
    """All variants, each beside the plain loop at its own shapes, and all beside the data-parallel processes."""
    # As the command line does: Ray's zero-GPU actors see no GPU, without a warning about it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    found = machine()
    configs = {variant or "as configured": load(file or DEMO, [*overrides, *shlex.split(variant)])
               for variant in ["", *variants]}
    plain: dict[str, list[dict[str, Any]]] = {}  # by what can change the result, and so the work
    runs: dict[str, list[Marks]] = {name: [] for name in configs}
    apart: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="flowgrpo-benchmark-") as folder:
        for turn in range(rounds):
            done = set()
            if processes:
                print(f"round {turn + 1}/{rounds}: {processes} data-parallel processes ...", file=sys.stderr)
                apart.append(data_parallel(configs["as configured"], folder, processes=processes, steps=steps, warmup=1))
            for number, (name, config) in enumerate(configs.items()):
                work = config.result_hash()
                if work not in done:
                    print(f"round {turn + 1}/{rounds}: plain loop, {name} ...", file=sys.stderr)
                    plain.setdefault(work, []).append(sequential(config, folder, steps=baseline_steps, warmup=1))
                    done.add(work)
                print(f"round {turn + 1}/{rounds}: actors, {name} ...", file=sys.stderr)
                trimmed = only_steps(config, folder, f"variant-{number}-{turn}", warmup + steps)
                runs[name].append(run_actors(trimmed, steps=steps, warmup=warmup, view=view))
    out = []
    for name, config in configs.items():
        parts = plain[config.result_hash()]
        rows = [row for part in parts for row in part["rows"]]
        out.append(figures(name, runs[name], summary(rows, parts[0]["images"], parts[0]["clock"]), apart, warmup))
    return {"benchmark": "whole_step", "machine": found,
            "targets": {"driver": DRIVER_TARGET, "busy_share": BUSY_TARGET},
            "processes": processes, "variants": out}


def show(result: Mapping[str, Any]) -> None:
    print_machine(result["machine"])
    apart = result["processes"] > 0
    print_table(
        ["variant", "s a step", "images/s", f"driver CPU s (target {DRIVER_TARGET:g})", "pure core-s",
         f"busy share (target {BUSY_TARGET:.2f})", "plain loop s", "ratio", *(["data-parallel s", "ratio"] if apart else [])],
        [[v["variant"], shown(v["step_seconds"], 2), f"{v['images_per_s']:.1f}", shown(v["driver_cpu_seconds"]),
          f"{v['pure_core_seconds']:.2f}", f"{v['busy_share']:.3f}", f"{v['baseline_step_seconds']:.2f}",
          f"{v['speed_up']:.2f}x",
          *([shown(v["data_parallel_step_seconds"], 2), f"{v['over_data_parallel']:.2f}x"] if apart else [])]
         for v in result["variants"]])
    for v in result["variants"]:
        shares = ", ".join(f"{key.split('/')[1]} {value:.2f}" for key, value in v["role_shares"].items())
        used, parts = (", ".join(f"{role} {seconds:.2f}" for role, seconds in v[key].items())
                       for key in ("cpu_seconds_by_process", "cpu_seconds_by_part"))
        phases = ", ".join(f"{name} {phase['cpu']['median']:.2f}" for name, phase in v["baseline"]["phases"].items())
        print(f"{v['variant']}\n  time each role worked: {shares}\n  CPU seconds a step by part: {parts}\n"
              f"  by process: {used}\n"
              f"  alone in one process: {phases}\n"
              f"  other programs had {v['share_of_others']:.1%} of the cores meanwhile")
        if apart:
            rounds = ", ".join(f"{ratio:.2f}" for ratio in v["over_data_parallel_by_round"])
            print(f"  ratio to {result['processes']} data-parallel processes ({v['data_parallel_cpu_seconds']:.2f} CPU "
                  f"seconds a step), round by round: {rounds}")


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--variant", action="append", default=[], metavar='"KEY=VALUE ..."',
                   help="overrides to compare, repeatable")
    p.add_argument("--steps", type=int, default=8, help="measured steps")
    p.add_argument("--warmup", type=int, default=2, help="steps before them (at least 1)")
    p.add_argument("--baseline-steps", type=int, default=5, help="measured steps of the plain loop")
    p.add_argument("--rounds", type=int, default=3, help="times over, in turns")
    p.add_argument("--processes", type=int, default=2, help="data-parallel processes to compare with; 0 = none")
    p.add_argument("--view", choices=("plain", "live"), default="plain",
                   help="what the driver shows meanwhile: plain lines, or the live view of a terminal (to nowhere)")

    def work(options: argparse.Namespace) -> dict[str, Any]:
        file, overrides = split_words(options.words)
        return measure(file, overrides, options.variant, steps=options.steps, warmup=max(1, options.warmup),
                       baseline_steps=options.baseline_steps, rounds=options.rounds, processes=options.processes,
                       view=options.view)

    return run_main(work, p, show, argv)


if __name__ == "__main__":
    raise SystemExit(main())
