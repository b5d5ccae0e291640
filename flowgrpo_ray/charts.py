"""The charts of a report: which metrics stand together, and how they are drawn."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowgrpo_ray.metrics import METRICS, Row, find


@dataclass(frozen=True)
class Theme:
    text: str
    grid: str
    colors: tuple[str, ...]


LIGHT = Theme("#475569", "#e2e8f0", ("#2563eb", "#d97706", "#059669", "#c026d3", "#dc2626", "#64748b"))
DARK = Theme("#a9b4c4", "#333b47", ("#7aa2ff", "#f5b04c", "#4fd1a5", "#e68af5", "#ff8f8f", "#a8b3c4"))


@dataclass(frozen=True)
class Line:
    """A curve: its key in the rows, its name in the legend, and the key of the half-width of a band around it."""

    key: str
    label: str
    band: str | None = None


@dataclass(frozen=True)
class Panel:
    """A chart before it is drawn; `smooth` adds a running mean over noisy curves."""

    section: str
    title: str
    note: str
    lines: tuple[Line, ...]
    smooth: bool = False
    log: bool = False
    limits: tuple[float, float] | None = None
    ordered: bool = False  # the curves are an ordered family, so their colours are too


@dataclass(frozen=True)
class Chart:
    """A drawn panel: PNGs in base64 for a light and for a dark page."""

    title: str
    note: str
    light: str
    dark: str


def series(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that have a finite value of `key`."""
    points = [(row["step"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
    return [x for x, _ in points], [y for _, y in points]


def keys_of(rows: Sequence[Row], name: str) -> list[str]:
    """Keys of one metric that occur in the rows, in natural order (`ratio_mean/2` before `ratio_mean/10`)."""
    found = {key for row in rows for key in row if key.split("/")[0] == name}
    return sorted(found, key=lambda key: [(not part.isdigit(), int(part) if part.isdigit() else 0, part)
                                          for part in key.split("/")])


def family(rows: Sequence[Row], name: str, band: str | None = None) -> tuple[Line, ...]:
    """A line for every value of a metric's variable part."""
    tails = [key.partition("/")[2] for key in keys_of(rows, name)]
    return tuple(Line(f"{name}/{tail}", tail, f"{band}/{tail}" if band else None) for tail in tails)


def in_order(keys: Sequence[str], rewards: Sequence[str]) -> list[str]:
    """Keys with a reward in them, in the order of `rewards`; those of other rewards (monitors) follow."""
    place = {name: index for index, name in enumerate(rewards)}
    names = [find(key)[1]["reward"] for key in keys]
    return [key for _, _, _, key in sorted((place.get(name, len(place)), name, index, key)
                                           for index, (name, key) in enumerate(zip(names, keys, strict=True)))]


def panels(rows: Sequence[Row], rewards: Sequence[str] = ()) -> list[Panel]:
    """The charts that a report shows, those without data left out; `rewards` come in this order."""
    out = []
    for key in in_order(keys_of(rows, "reward_mean"), rewards):
        name = key.partition("/")[2]
        out.append(Panel(
            "Learning", f"Training reward: {name}", "Mean over the step's samples; band: standard deviation.",
            (Line(key, name, f"reward_std/{name}"),), smooth=True))
    evaluated: dict[str, list[Line]] = {}
    for key in in_order(keys_of(rows, "eval")[::-1], rewards):  # policy before ema
        evaluated.setdefault(find(key)[1]["reward"], []).append(Line(key, find(key)[1]["weights"]))
    for name, lines in evaluated.items():
        out.append(Panel(
            "Learning", f"Evaluation: {name}", "Mean score of ODE samples at fixed seeds.", tuple(lines)))
    one = [
        ("Learning", "Groups without spread", "Share of groups whose scores are all equal: they teach nothing.",
         "zero_std_group_fraction", {"limits": (-0.02, 1.02)}),
        ("Update", "KL to the reference", "Distance from the model without the adapter, before β.", "kl", {}),
        ("Update", "Approximate KL", "½·mean((Δ log p)²) between sampling and learning.", "approx_kl", {}),
    ]
    tail = [
        ("Update", "Gradient norm", "Before clipping.", "grad_norm", {"log": True}),
        ("Update", "Gradient RMS over AdamW's eps", "Near 1, eps and not the gradient sets the step.",
         "grad_rms_over_adam_eps", {"log": True}),
        ("Update", "Adapter change", "Norm of what the step added to the adapter.", "adapter_delta_norm", {}),
        ("Update", "On-policy check", "Largest |log ratio| before the first update; 0 = same policy.",
         "first_update_log_ratio_max", {}),
    ]
    out += [Panel(s, t, n, (Line(k, k),), **o) for s, t, n, k, o in one]
    out += [
        Panel("Update", "Clip fraction", "Share of ratios outside the clip range.", (
            Line("clip_fraction", "all"), Line("clip_fraction_low", "low"), Line("clip_fraction_high", "high"))),
        Panel("Update", "Mean ratio", "new / old probability, by step of the window.", family(rows, "ratio_mean"),
              ordered=True),
        Panel("Update", "Spread of the ratio", "Standard deviation, by step of the window.", family(rows, "ratio_std"),
              ordered=True),
    ]
    out += [Panel(s, t, n, (Line(k, k),), **o) for s, t, n, k, o in tail]
    out += [
        Panel("Speed", "Throughput", "Training images per second of a step.", (
            Line("images_per_s", "all actors"), Line("images_per_gpu_s", "per GPU"))),
        Panel("Speed", "Busy share", "Share of the step in which a role's actors worked.", family(rows, "busy_share"),
              limits=(-0.02, 1.02)),
        Panel("Speed", "Time", "Seconds per step; phases overlap.", tuple(
            Line(f"time_{phase}", phase) for phase in ("step", "rollout", "reward", "learn", "sync", "eval"))),
    ]
    if any(series(rows, "staleness")[1]):
        out.append(Panel("Speed", "Staleness", "Training steps between sampling weights and learning weights.",
                         (Line("staleness", "staleness"),)))
    counters = [key for metric in METRICS if metric.machine and metric.kind == "counter"
                for key in keys_of(rows, metric.name)]
    trouble = [Line(key, key) for key in [*keys_of(rows, "masked_samples"), *counters] if any(series(rows, key)[1])]
    out.append(Panel("Trouble", "Failures", "Samples masked in the step, and totals since the start.", tuple(trouble)))
    return [panel for panel in out if any(series(rows, line.key)[0] for line in panel.lines)]


def draw(rows: Sequence[Row], panel: Panel) -> Chart:
    """Draw one panel for both kinds of page."""
    return Chart(panel.title, panel.note, *(_png(_figure(rows, panel, theme)) for theme in (LIGHT, DARK)))


def _figure(rows: Sequence[Row], panel: Panel, theme: Theme) -> Figure:
    figure = Figure(figsize=(4.6, 2.6), dpi=120, layout="constrained")  # no pyplot: no global state to leak
    axes = figure.add_subplot()
    lines = [line for line in panel.lines if series(rows, line.key)[0]]
    for index, line in enumerate(lines):
        _curve(axes, rows, line, panel, _color(theme, index, len(lines), panel.ordered))
    values = [value for line in lines for value in series(rows, line.key)[1]]
    if panel.log and min(values) > 0:
        axes.set_yscale("log")
    if panel.limits:
        axes.set_ylim(*panel.limits)
    elif min(values) == max(values) and not any(line.band for line in lines):
        axes.set_ylim(values[0] - max(abs(values[0]), 1.0), values[0] + max(abs(values[0]), 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    _dress(axes, theme)
    if len(lines) > 1 or panel.section == "Trouble":
        figure.legend(loc="outside upper left", fontsize=7.5, frameon=False, labelcolor=theme.text, handlelength=1.3,
                      ncols=2 if panel.section == "Trouble" else 5, columnspacing=1.2, borderpad=0.1)
    unit = find(lines[0].key)[0].unit
    if unit != "1":
        axes.set_ylabel(unit, color=theme.text, fontsize=8)
    return figure


def _curve(axes: Axes, rows: Sequence[Row], line: Line, panel: Panel, color: str | tuple[float, ...]) -> None:
    steps, values = series(rows, line.key)
    label = line.label.replace("$", r"\$")  # a name is no formula
    marker = "o" if len(steps) < 30 else None
    smooth = panel.smooth and len(steps) >= 20
    axes.plot(steps, values, color=color, lw=1.0 if smooth else 1.6, alpha=0.4 if smooth else 1.0, marker=marker, ms=3,
              label=label)
    if smooth:
        axes.plot(steps, _running_mean(values), color=color, lw=1.9)
    if line.band:
        bands = [(row["step"], row[line.key], row[line.band]) for row in rows
                 if math.isfinite(row.get(line.key, math.nan)) and math.isfinite(row.get(line.band, math.nan))]
        if bands:
            axes.fill_between([x for x, _, _ in bands], [y - b for _, y, b in bands], [y + b for _, y, b in bands],
                              color=color, alpha=0.13, lw=0)


def _running_mean(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential running mean, its start corrected so that it does not lean on a zero."""
    out, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = weight * total + value, weight * mass + 1
        out.append(total / mass)
    return out


def _color(theme: Theme, index: int, count: int, ordered: bool) -> str | tuple[float, ...]:
    if not ordered or count == 1:
        return theme.colors[index % len(theme.colors)]
    from matplotlib import colormaps

    place: Callable[[float], float] = lambda t: 0.1 + 0.75 * t if theme is LIGHT else 0.25 + 0.7 * t  # noqa: E731
    return colormaps["viridis"](place(index / (count - 1)))


def _dress(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor("none")
    axes.grid(True, color=theme.grid, lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(colors=theme.text, labelsize=8, length=0)
    axes.yaxis.get_offset_text().set(color=theme.text, fontsize=7.5)
    axes.set_xlabel("step", color=theme.text, fontsize=8)


def _png(figure: Figure) -> str:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", transparent=True)
    return base64.b64encode(sink.getvalue()).decode()
