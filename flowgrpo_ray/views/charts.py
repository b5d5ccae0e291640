"""How curves and histograms are drawn: PNGs for a light and for a dark page."""

from __future__ import annotations

import base64
import io
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowgrpo_ray.run_dir.metrics import Row

SMOOTHED_FROM = 10  # points; shorter curves are shown as they are
_WIDTH, _HEIGHT = 4.6, 2.6  # inches


@dataclass(frozen=True)
class Theme:
    text: str
    grid: str
    colors: tuple[str, ...]


LIGHT = Theme("#475569", "#e2e8f0", ("#2563eb", "#d97706", "#059669", "#c026d3", "#dc2626", "#64748b"))
DARK = Theme("#a9b4c4", "#333b47", ("#7aa2ff", "#f5b04c", "#4fd1a5", "#e68af5", "#ff8f8f", "#a8b3c4"))


@dataclass(frozen=True)
class Curve:
    """A curve before it is drawn; `band` is the half-width around each point, `smooth` adds a smoothed line; `color` is an
    index, for curves that belong together."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    band: Sequence[float] | None = None
    band_label: str | None = None
    smooth: bool = False
    color: int | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawn chart: PNGs in base64 for a light and for a dark page."""

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


def width_of(xs: Sequence[float]) -> float:
    """Standard deviation of the smoothing kernel: 3 % of the axis, and at least one and a half typical distances."""
    return max(1.5 * float(np.median(np.diff(xs))), 0.03 * (xs[-1] - xs[0]))


def smoothed(xs: Sequence[float], ys: Sequence[float], width: float) -> list[float]:
    """Local linear regression under a Gaussian of standard deviation `width` centred on each point (`xs` ascending).

    A straight line is returned as it is, at its ends too: unlike a running mean it does not lag behind a rising curve.
    """
    x, y, out = np.asarray(xs, float), np.asarray(ys, float), []
    for centre in x:
        near = slice(bisect_left(xs, centre - 4 * width), bisect_right(xs, centre + 4 * width))
        d, v = x[near] - centre, y[near]
        w = np.exp(-0.5 * (d / width) ** 2)
        s0, s1, s2, t0, t1 = w.sum(), (w * d).sum(), (w * d * d).sum(), (w * v).sum(), (w * d * v).sum()
        det = s0 * s2 - s1 * s1
        out.append(float((s2 * t0 - s1 * t1) / det if det > 1e-12 * s0 * s0 * width * width else t0 / s0))
    return out


def plot(
    title: str, note: str, curves: Sequence[Curve], *, unit: str = "1", xlabel: str = "step", log: bool = False,
    limits: tuple[float, float] | None = None, ordered: bool = False, legend_columns: int = 5, wide: bool = False,
) -> Chart:
    """Draw curves into one pair of axes; `ordered` curves are a family, so their colours are too."""

    def figure(theme: Theme) -> Figure:
        out, axes = _empty(theme, wide)
        for index, curve in enumerate(curves):
            _curve(axes, curve, _color(theme, index if curve.color is None else curve.color, len(curves), ordered))
        values = [value for curve in curves for value in curve.ys]
        if log and min(values) > 0:
            axes.set_yscale("log")
        if limits:
            axes.set_ylim(*limits)
        elif min(values) == max(values) and not any(curve.band for curve in curves):
            axes.set_ylim(values[0] - max(abs(values[0]), 1.0), values[0] + max(abs(values[0]), 1.0))
        if xlabel == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        _finish(out, axes, theme, legend_columns, xlabel, "" if unit == "1" else unit)
        return out

    return Chart(title, note, *(_png(figure(theme)) for theme in (LIGHT, DARK)))


def histogram(title: str, note: str, groups: Sequence[tuple[str, Sequence[float]]], xlabel: str = "score") -> Chart:
    """Share of the samples of each group in bins that all groups share."""
    everything = np.concatenate([np.asarray(values, float) for _, values in groups])
    low, high = float(everything.min()), float(everything.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins = np.linspace(low, high, 25)

    def figure(theme: Theme) -> Figure:
        out, axes = _empty(theme)
        for index, (label, values) in enumerate(groups):
            share = np.histogram(values, bins)[0] / len(values)
            color = theme.colors[index % len(theme.colors)]
            axes.stairs(share, bins, fill=True, color=color, alpha=0.28)
            axes.stairs(share, bins, color=color, lw=1.4, label=_plain(label))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        _finish(out, axes, theme, 3, xlabel, "share of samples")
        return out

    return Chart(title, note, *(_png(figure(theme)) for theme in (LIGHT, DARK)))


def _curve(axes: Axes, curve: Curve, color: str | tuple[float, ...]) -> None:
    label, smooth = _plain(curve.label), curve.smooth and len(curve.xs) >= SMOOTHED_FROM
    axes.plot(curve.xs, curve.ys, color=color, lw=1.0 if smooth else 1.6, alpha=0.4 if smooth else 1.0,
              linestyle="--" if curve.dashed else "-", marker="o" if len(curve.xs) < 30 else None, ms=3, label=label)
    if smooth:
        width = width_of(curve.xs)
        axes.plot(curve.xs, smoothed(curve.xs, curve.ys, width), color=color, lw=2.0,
                  label=f"smoothed: centred, σ {width:.3g}")
    if curve.band:
        x, y, half = (np.asarray(values, float) for values in (curve.xs, curve.ys, curve.band))
        axes.fill_between(x, y - half, y + half, color=color, alpha=0.13, lw=0, label=curve.band_label)


def _plain(label: str) -> str:
    return label.replace("$", r"\$")  # a name is not a formula


def _empty(theme: Theme, wide: bool = False) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.4 if wide else _WIDTH, 3.1 if wide else _HEIGHT), dpi=120,
                    layout="constrained")  # no pyplot: no global state to leak
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.grid(True, color=theme.grid, lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    return figure, axes


def _finish(figure: Figure, axes: Axes, theme: Theme, columns: int, xlabel: str, ylabel: str) -> None:
    if len(axes.get_legend_handles_labels()[1]) > 1:
        figure.legend(loc="outside upper left", fontsize=7.5, frameon=False, labelcolor=theme.text, handlelength=1.3,
                      ncols=columns, columnspacing=1.2, borderpad=0.1)
    axes.tick_params(colors=theme.text, labelsize=8, length=0)
    axes.yaxis.get_offset_text().set(color=theme.text, fontsize=7.5)
    axes.set_xlabel(xlabel, color=theme.text, fontsize=8)
    if ylabel:
        axes.set_ylabel(ylabel, color=theme.text, fontsize=8)


def _color(theme: Theme, index: int, count: int, ordered: bool) -> str | tuple[float, ...]:
    if not ordered or count == 1:
        return theme.colors[index % len(theme.colors)]
    from matplotlib import colormaps

    place: Callable[[float], float] = lambda t: 0.1 + 0.75 * t if theme is LIGHT else 0.25 + 0.7 * t  # noqa: E731
    return colormaps["viridis"](place(index / (count - 1)))


def _png(figure: Figure) -> str:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", transparent=True)
    return base64.b64encode(sink.getvalue()).decode()
