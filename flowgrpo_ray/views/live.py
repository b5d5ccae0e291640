"""What a person sees of a run: the live view in a terminal, a line per step elsewhere, and the summary at its end."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowgrpo_ray import storage
from flowgrpo_ray.config import Config
from flowgrpo_ray.errors import counted
from flowgrpo_ray.run_dir.metrics import Row, read_metrics
from flowgrpo_ray.run_dir.sample_table import list_grids
from flowgrpo_ray.views import log_lines
from flowgrpo_ray.views.status import duration, seconds_left

LIBRARIES = ("ray", "diffusers", "transformers", "peft", "accelerate", "matplotlib", "PIL", "huggingface_hub", "httpx",
             "urllib3", "fsspec", "absl", "tensorboard")
_BARS = "▁▂▃▄▅▆▇█"
_ACTORS_SHOWN = 4  # actors of a pool that get a line each; larger pools are counted by what they do


class RunConsole(Console):
    """Where a run reports. If nobody reads that any more (`train | head`, a dead `tee`), the run goes on: hours of work are
    not lost for want of a reader."""

    def on_broken_pipe(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        if not self.stderr:
            with suppress(OSError):
                print("standard output was closed by its reader; the run continues without it", file=sys.stderr, flush=True)


def set_up_logging(level: str, console: Console) -> None:
    """Log records of this project at `level` through `console`; of libraries, warnings and errors only.

    In a terminal they are printed above the live view, elsewhere as lines with time and step (`log_lines`).
    """
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, markup=False, log_time_format="%H:%M:%S",
                              rich_tracebacks=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        log_lines.begin()
        handler = log_lines.handler()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("flowgrpo_ray", "actors"):
        logging.getLogger(name).setLevel(level.upper())
    libraries = logging.DEBUG if level == "debug" else logging.WARNING
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(libraries)
    logging.getLogger("matplotlib.font_manager").setLevel(logging.DEBUG if level == "debug" else logging.ERROR)


class PlainView:
    """A line per step; implements the controller's `Observer`."""

    def __init__(self, config: Config, console: Console) -> None:
        self.config, self.console = config, console
        self.rows: list[Row] = []
        self.start_step = 0
        self.started = time.monotonic()
        self._optimised = [name for name, reward in config.rewards.items() if reward.weight] or list(config.rewards)

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def activity(self, doing: dict[str, list[str]]) -> None:
        """Nothing to show of it in plain lines."""

    def row(self, row: Row) -> None:
        self.rows.append(row)
        self._print(self._line(row), step=False)

    def resumes(self, step: int) -> None:
        self.start_step = step
        self.say(f"resuming from step {step}")

    def say(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str, *, step: bool = True) -> None:
        _print(self.console, text, step=step)

    def _line(self, row: Row) -> str:
        """A row in one line."""
        last = self.config.run.steps
        parts = [f"step {int(row['step']):>{len(str(last))}}/{last}"]
        for name in self._optimised:
            if f"reward_mean/{name}" in row:
                parts.append(f"{name} {row[f'reward_mean/{name}']:.4f}")
        if masked := row.get("masked_samples"):
            parts.append(f"{counted(int(masked), 'image')} without score")
        kl = ("kl", "kl", ".3g") if self.config.loss.beta else ("approx_kl", "approx kl", ".1e")
        for key, label, form in (kl, ("clip_fraction", "clip", ".3f"), ("images_per_s", "images/s", ".1f")):
            if key in row:
                parts.append(f"{label} {row[key]:{form}}")
        if "time_step" in row:
            parts.append(f"{row['time_step']:.1f} s")
        if evaluated := self._evaluated(row):
            parts.append(f"evaluation: {evaluated}")
        left = self.seconds_left()
        if "time_step" in row and left:
            parts.append(f"about {duration(left)} left")
        return "  ".join(parts)

    def _evaluated(self, row: Row) -> str:
        return ", ".join(f"{name} {row[key]:.4f}{' (ema)' if weights == 'ema' else ''}" for name in self._optimised
                         for weights in ("policy", "ema") if (key := f"eval/{weights}/{name}") in row)

    def seconds_left(self) -> float | None:
        """Estimate from the last steps; None before the first."""
        times = [row["time_step"] for row in self.rows if "time_step" in row]
        return seconds_left(times, self.config.run.steps - int(self.rows[-1]["step"])) if times else None


class LiveView(PlainView):
    """The live view: progress, curves and what every actor is doing. Log records and what `say` is given scroll by
    above it, in full, and stay when it ends."""

    def __init__(self, config: Config, console: Console) -> None:
        super().__init__(config, console)
        self._doing: dict[str, list[str]] = {}
        self._events: deque[str] = deque(maxlen=3)
        self._warnings = _WarningCounter()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        logging.getLogger().addHandler(self._warnings)
        self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._live.__exit__(*exc)
        logging.getLogger().removeHandler(self._warnings)

    def activity(self, doing: dict[str, list[str]]) -> None:
        self._doing = doing

    def row(self, row: Row) -> None:
        self.rows.append(row)
        if evaluated := self._evaluated(row):
            self._events.append(f"evaluation at step {int(row['step'])}: {evaluated}")

    def _render(self) -> Panel:
        done = int(self.rows[-1]["step"]) if self.rows else self.start_step
        steps, left = self.config.run.steps, self.seconds_left()
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        clock = f"{duration(time.monotonic() - self.started)}" + (f", about {duration(left)} left" if left else "")
        head.add_row(ProgressBar(total=steps, completed=done), f"step {done}/{steps}  {clock}")
        parts: list[Any] = [head, self._numbers(), self._actors()]
        if self._events:
            parts.append(Text("\n".join(self._events), style="dim", overflow="ellipsis", no_wrap=True))
        if self._warnings.count:
            count = self._warnings.count
            last = f"{counted(count, 'warning')}, the last: {self._warnings.last}"
            parts.append(Text(last, style="yellow", overflow="ellipsis", no_wrap=True))
        return Panel(Group(*parts), title=f"flowgrpo-ray  {escape(self.config.run.name)}", title_align="left",
                     border_style="blue")

    def _numbers(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in self._optimised:
            key = f"reward_mean/{name}"
            values = [row[key] for row in self.rows if key in row]
            scores = [row[f"eval/policy/{name}"] for row in self.rows if f"eval/policy/{name}" in row]
            evaluated = " -> ".join(f"{score:.3f}" for score in scores[:1] + scores[1:][-1:])
            evaluated = f"evaluation {evaluated}" if evaluated else ""
            table.add_row(f"reward {name}", Text(f"{values[-1]:.4f}" if values else "-", style="bold green"),
                          Text(sparkline(values[-40:]), style="green"), Text(evaluated, style="dim"))
        row = self.rows[-1] if self.rows else {}
        kl = ("kl", "KL", ".3g") if "kl" in row else ("approx_kl", "approx. KL", ".1e")  # without beta none is measured
        cells = [f"{label} {row[key]:{form}}" for key, label, form in (
            kl, ("clip_fraction", "clip fraction", ".3f"), ("images_per_s", "images/s", ".1f"),
        ) if key in row]
        outer = Table.grid()
        outer.add_row(table)
        if cells:
            outer.add_row(Text("   ".join(cells)))
        return outer

    def _actors(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for pool, members in self._doing.items():
            if len(members) <= _ACTORS_SHOWN:
                lines = members
            else:
                kinds = [what.split(" ", 1)[0].rstrip(":") for what in members]
                lines = [", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))]
            for number, what in enumerate(lines):
                table.add_row(Text(pool if number == 0 else "", style="cyan"),
                              Text(what, style="dim" if what == "idle" else "", overflow="ellipsis", no_wrap=True))
        return table


def _print(console: Console, text: str, *, step: bool = True, style: str | None = None) -> None:
    console.print(log_lines.marked(text, step=step), markup=False, highlight=False, soft_wrap=True, style=style)


class _WarningCounter(logging.Handler):
    """Counts warnings and errors, and keeps the last one's first line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count, self.last = 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        self.last = (record.getMessage().splitlines() or [""])[0]


def open_view(config: Config, console: Console) -> PlainView:
    """The live view where there is a terminal and `logging.live` allows it, else plain lines."""
    return (LiveView if config.logging.live and console.is_terminal else PlainView)(config, console)


def sparkline(values: Sequence[float]) -> str:
    """Values as bars of eight heights, from the least to the greatest of them."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_BARS[round((value - low) / span * 7)] if span else _BARS[3] for value in finite)


def print_summary(config: Config, run_dir: str, console: Console) -> None:
    """Rewards before and after, and where everything is."""
    from flowgrpo_ray.views.report import evaluation

    rows = read_metrics(run_dir)
    if not rows:
        return
    comparisons = evaluation(rows, config.model_dump(mode="json"))
    if comparisons:
        first, last = comparisons[0].first_step, comparisons[0].last_step
        width = max(len("reward"), *(len(line.reward) for line in comparisons))
        steps = f"step {first} and step {last}" if last > first else f"step {last}"
        _print(console, f"Mean reward on the evaluation prompts, {steps} (± standard error)", style="bold")
        lines = [("reward", "weights", "before", "after", "change", "dim")] if last > first else []
        for line in comparisons:
            before, after = (f"{mean:.4f} ± {error or 0:.4f}" for mean, error in (
                (line.first, line.first_error), (line.last, line.last_error)))
            better = line.headline and line.direction * line.change > 0
            change, style = f"{line.change:+.4f}", "bold green" if better else "default"
            lines.append((line.reward, line.weights, before, after, change, style) if last > first
                         else (line.reward, line.weights, after, "", "", "default"))
        for reward, weights, before, after, change, style in lines:
            _print(console, f"  {reward:<{width}}  {weights:<7}  {before:>18}  {after:>18}  {change:>9}", style=style)
    else:
        why = _why_no_evaluation(config, rows)
        for name in config.rewards:
            values = [row[f"reward_mean/{name}"] for row in rows if f"reward_mean/{name}" in row]
            if values:
                _print(console, f"{name} on the training prompts: {values[0]:.4f} at first, {values[-1]:.4f} at last ({why})")
    minutes = rows[-1].get("time_total", 0.0) / 60
    _print(console, f"trained {counted(int(rows[-1]['step']), 'step')} in {minutes:.1f} minutes")
    for what, where in places(run_dir, int(rows[-1]["step"])):
        _print(console, f"  {what:<9} {where}")


def _why_no_evaluation(config: Config, rows: Sequence[Row]) -> str:
    if not config.data.eval_prompts:
        return "data.eval_prompts is not set"
    if any(key.startswith("eval_images/") for row in rows for key in row):  # all rewards need whole groups
        return "no reward scores images one by one"
    return "evaluations are off: eval.every_steps, eval.at_start and eval.at_end"


def places(run_dir: str, step: int) -> list[tuple[str, str]]:
    """What a finished run left, and where: the report, first and last images, the adapter."""
    out = []
    if storage.size(storage.join(run_dir, "report.html")) is not None:
        out.append(("report", storage.join(run_dir, "report.html")))
    grids = [uri for weights, _, uri in list_grids(run_dir) if weights == "policy"]
    if grids:
        out.append(("images", grids[0]))
        if len(grids) > 1:
            out.append(("", grids[-1]))
    adapter = storage.join(run_dir, "checkpoints", f"step_{step}", "adapter")
    if storage.list_dir(adapter):
        out.append(("adapter", adapter))
    return [(what, storage.display(where)) for what, where in out]
