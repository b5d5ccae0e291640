"""Which metrics of a run stand together in a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo_ray.run_dir.metrics import METRICS, Row, find
from flowgrpo_ray.run_dir.watch import combine_of, total_series, weights_of
from flowgrpo_ray.views.charts import Chart, Curve, keys_of, plot, series


@dataclass(frozen=True)
class Line:
    """A curve: its key in the rows, its name in the legend, and the key of the half-width of a band around it."""

    key: str
    label: str
    band: str | None = None


@dataclass(frozen=True)
class Panel:
    """A chart before it is drawn."""

    section: str
    title: str
    note: str
    lines: tuple[Line, ...]
    smooth: bool = False
    log: bool = False
    limits: tuple[float, float] | None = None
    ordered: bool = False  # the curves are an ordered family, so their colours are too


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
        out.append(Panel("Learning", f"Training reward: {name}", "Mean over the step's samples.",
                         (Line(key, "per step", f"reward_std/{name}"),), smooth=True))
    evaluated: dict[str, list[Line]] = {}
    for key in in_order(keys_of(rows, "eval")[::-1], rewards):  # policy before ema
        evaluated.setdefault(find(key)[1]["reward"], []).append(Line(key, find(key)[1]["weights"]))
    for name, lines in evaluated.items():
        out.append(Panel(
            "Learning", f"Evaluation: {name}", "Mean score of ODE samples at fixed seeds.", tuple(lines)))
    one: list[tuple[str, str, str, str, dict[str, Any]]] = [
        ("Learning", "Groups without spread", "Share of groups whose scores are all equal: they teach nothing.",
         "zero_std_group_fraction", {"limits": (-0.02, 1.02)}),
        ("Update", "KL to the reference", "Distance from the model without the adapter, before β.", "kl", {}),
        ("Update", "Approximate KL", "½·mean((Δ log p)²) between sampling and learning.", "approx_kl", {}),
    ]
    tail: list[tuple[str, str, str, str, dict[str, Any]]] = [
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
            Line(f"time_{phase}", phase) for phase in ("step", "learn", "encode", "sync", "eval"))),
    ]
    if any(series(rows, "staleness")[1]):
        out.append(Panel("Speed", "Staleness", "Training steps between sampling weights and learning weights.",
                         (Line("staleness", "staleness"),)))
    counters = [key for metric in METRICS if metric.machine and metric.kind == "counter"
                for key in keys_of(rows, metric.name)]
    trouble = [Line(key, key) for key in [*keys_of(rows, "masked_samples"), *counters] if any(series(rows, key)[1])]
    out.append(Panel("Trouble", "Failures", "Samples masked in the step, and totals since the start: "
                     + ", ".join(line.key for line in trouble) + ".", tuple(trouble)))
    return [panel for panel in out if any(series(rows, line.key)[0] for line in panel.lines)]


def draw(rows: Sequence[Row], panel: Panel) -> Chart:
    """Draw one panel."""
    lines = [line for line in panel.lines if series(rows, line.key)[0]]
    curves = [curve_of(rows, line, panel.smooth) for line in lines]
    return plot(panel.title, panel.note, curves, unit=find(lines[0].key)[0].unit, log=panel.log, limits=panel.limits,
                ordered=panel.ordered, legend_columns=2 if panel.section == "Trouble" else 5)


def curve_of(rows: Sequence[Row], line: Line, smooth: bool) -> Curve:
    steps, values = series(rows, line.key)
    shown = [row for row in rows if math.isfinite(row.get(line.key, math.nan))]
    halves = [row.get(line.band or "", math.nan) for row in shown]
    band = halves if any(map(math.isfinite, halves)) else None
    return Curve(line.label, steps, values, band, "± std of samples", smooth)


def headline(rows: Sequence[Row], config: Mapping[str, Any], of: str) -> Chart | None:
    """The curve of what is optimised as a whole, in training and in evaluation; None before the first step."""
    weights = {name: weight for name, weight in weights_of(config).items() if weight}
    trained, evaluated = total_series(rows, config), total_series(rows, config, of)
    if not trained[0] and not evaluated[0]:
        return None
    unit = "score"
    if list(weights.values()) == [1.0]:
        title, note = f"Reward: {next(iter(weights))}", "Training samples (SDE, mean of the step) and evaluation (ODE)."
    elif combine_of(config) == "gdpo":
        title, unit = "Total reward", "spreads"
        note = ("gdpo has no raw total: Σ weight · (mean − mean at the start) / spread inside a group at the start, of the "
                "optimised rewards.")
    else:
        title, note = "Total reward", "Σ weight · score of the optimised rewards."
    curves = [Curve("training, per step", *trained, smooth=True), Curve(f"evaluation ({of})", *evaluated, dashed=True)]
    return plot(title, note, [curve for curve in curves if curve.xs], unit=unit, wide=True)
