"""What the benchmarks share: their command line, timing in turns, statistics, and printing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowgrpo_ray import device as devices
from flowgrpo_ray.config import Config, load
from flowgrpo_ray.errors import ConfigError, FlowGrpoError

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "configs" / "tiny_ocr.yaml"


@dataclass(frozen=True)
class Timing:
    """Seconds of one repeat: wall clock, and CPU time of this process (all its threads)."""

    wall: float
    cpu: float


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Timing, Any]:
    """Run once; waits for the device. Returns the timing and what `work` returned."""
    devices.synchronize(device)
    with devices.Stopwatch(device) as watch:
        value = work()
    return Timing(watch.seconds, watch.cpu_seconds), value


def take_turns(
    sides: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device, *,
    between: Callable[[], Any] | None = None,
) -> dict[str, list[Timing]]:
    """Time every side `repeats` times, after one untimed run of each; who goes first changes from repeat to repeat.

    `between` runs untimed before every run (to put weights back, say).
    """
    out: dict[str, list[Timing]] = {name: [] for name in sides}
    names = list(sides)
    for repeat in range(-1, repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            if between is not None:
                between()
            timing, _ = timed(sides[name], device)
            if repeat >= 0:
                out[name].append(timing)
    return out


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    values = list(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": statistics.median(values), "low": low, "high": high, "n": len(values)}


def speed_ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """median(slow) / median(fast) of seconds, with the quartiles of the ratios of paired repeats."""
    paired = spread([a / b for a, b in zip(slow, fast, strict=True)])
    return {"median": statistics.median(slow) / statistics.median(fast), "low": paired["low"], "high": paired["high"],
            "n": paired["n"]}


def shown(value: Mapping[str, float], digits: int = 3) -> str:
    """`median (low–high)`."""
    return f"{value['median']:.{digits}f} ({value['low']:.{digits}f}–{value['high']:.{digits}f})"


# Command line ---------------------------------------------------------------------------------------------------------


def parser(text: str | None, *, config: Path | None = DEMO) -> argparse.ArgumentParser:
    """The options that all benchmarks have; `config` is the default file."""
    p = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = f"; default {config.relative_to(ROOT)}" if config else ""
    p.add_argument("words", nargs="*", metavar="CONFIG | KEY=VALUE",
                   help=f"a YAML configuration{where}, and values laid over it")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return p


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """(configuration file or None, overrides) of the positional arguments."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"two configuration files: {files[0]} and {files[1]}; overrides have the form "
                          "section.key=value")
    return (files[0] if files else None), [word for word in words if "=" in word]


def configuration(words: Sequence[str]) -> Config:
    """The configuration of a command line."""
    file, overrides = split_words(words)
    return load(file or DEMO, overrides)


def device_of(name: str, config: Config) -> torch.device:
    """The process set up as an actor's on `cpu` or `cuda`."""
    return devices.configure_process(on_gpu=name == "cuda", cpu_threads=config.model.cpu_threads)


def run_main(main: Callable[[argparse.Namespace], dict[str, Any]], p: argparse.ArgumentParser,
             show: Callable[[dict[str, Any]], None], argv: Sequence[str] | None = None) -> int:
    """Parse, run, print; explained failures become one line and exit code 2. A result with `ok` False gives 1."""
    options = p.parse_intermixed_args(argv)
    try:
        result = main(options)
    except FlowGrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 0 if result.get("ok", True) else 1


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """What the numbers were measured on."""
    gpu = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None
    return {"cores": cores(), "load_average_1min": os.getloadavg()[0], "gpu": gpu, "torch": torch.__version__,
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d %H:%M")}


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table; the first column is left-aligned."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def print_machine(found: Mapping[str, Any]) -> None:
    gpu = f", {found['gpu']}" if found["gpu"] else ""
    print(f"{found['cores']} cores{gpu}, load average {found['load_average_1min']:.1f} at the start, "
          f"torch {found['torch']}, Python {found['python']}, {found['date']}")
