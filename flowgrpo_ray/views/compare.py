"""Two runs side by side in one HTML file: configuration, rewards against images and against time, images of equal seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from flowgrpo_ray import storage
from flowgrpo_ray.run_dir import watch
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.run_dir.run_data import RunData
from flowgrpo_ray.run_dir.sample_table import GridImage
from flowgrpo_ray.views import charts, grids, page

_PAIRS_SHOWN = 16
_NOT_COMPARED = ("run.name", "run.dir")  # two runs always differ in them


@dataclass(frozen=True)
class Score:
    """Newest evaluation of one score in both runs; None if a run has none."""

    name: str
    a: float | None
    b: float | None
    a_step: int = 0
    b_step: int = 0


def render(a_dir: str, b_dir: str) -> str:
    """The page as text.

    Raises:
        FlowGrpoError: a file of a run is damaged (it is named).
    """
    a, b = RunData.read(a_dir), RunData.read(b_dir)
    names = _labels(a, b)
    rewards = list({**watch.weights_of(a.config), **watch.weights_of(b.config)})
    found = [ends[-1:] for ends in (grids.ends(a_dir, a.weights), grids.ends(b_dir, b.weights))]
    return page.render(
        "compare.html", names=names, places=[storage.display(run.run_dir) for run in (a, b)], changes=changes(a, b),
        scores=scores(a, b, rewards), sections=[
            (title, note, [chart for name in rewards if (chart := chart_of((a, b), names, name, axis))])
            for title, note, axis in (("Reward against images", "Training images sampled so far.", "images"),
                                      ("Reward against time", "Wall time of the run so far, stops left out.", "time_total"))],
        pairs=pairs(found, names, rewards), steps=[ends[0][0] if ends else None for ends in found])


def _labels(a: RunData, b: RunData) -> tuple[str, str]:
    return (a.name, b.name) if a.name != b.name else (f"{a.name} (A)", f"{b.name} (B)")


def changes(a: RunData, b: RunData) -> list[tuple[str, str, str]]:
    """(key, value of a, value of b) of everything that differs in the configurations; a section that one of them lacks is
    one entry."""
    return [(path, storage.redact(_shown(one)), storage.redact(_shown(other)))
            for path, one, other in _differing(a.config, b.config) if path not in _NOT_COMPARED]


def _differing(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [found for key in dict.fromkeys([*a, *b])
                for found in _differing(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))]
    return [] if a == b else [(path, a, b)]


def _shown(value: Any) -> str:
    """A value in a line; of a section what is set."""
    if isinstance(value, dict):
        parts = {key: _shown(part) for key, part in value.items() if part is not None}
        return ", ".join(f"{key}: {text}" for key, text in parts.items() if text not in ("", "[]"))
    return "–" if value is None else str(value)


def scores(a: RunData, b: RunData, rewards: Sequence[str]) -> list[Score]:
    """Newest evaluations under each run's headline weights; scores of `rewards` come first."""
    values: list[dict[str, tuple[float, int]]] = []
    for run in (a, b):
        prefix = f"eval/{run.weights}/"
        values.append({key.removeprefix(prefix): (row[key], int(row["step"])) for row in run.rows for key in row
                       if key.startswith(prefix)})
    names = dict.fromkeys([name for name in rewards if any(name in of for of in values)] + [*values[0], *values[1]])
    both = [(name, values[0].get(name, (None, 0)), values[1].get(name, (None, 0))) for name in names]
    return [Score(name, one, other, one_step, other_step) for name, (one, one_step), (other, other_step) in both]


def chart_of(runs: Sequence[RunData], names: Sequence[str], reward: str, axis: str) -> charts.Chart | None:
    """Training and evaluation means of one reward in both runs over an axis: "images" (sampled so far) or a metric."""
    curves = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        where = positions(run.rows, axis)
        for key, what in ((f"reward_mean/{reward}", "training"), (f"eval/{run.weights}/{reward}", "evaluation")):
            points = [(x, row[key]) for x, row in zip(where, run.rows, strict=True)
                      if math.isfinite(row.get(key, math.nan)) and math.isfinite(x)]
            if points:
                xs, ys = zip(*points, strict=True)
                held_out = what == "evaluation"
                curves.append(charts.Curve(f"{name}, {what}", xs, ys, smooth=not held_out, dashed=held_out, color=index))
    if not curves:
        return None
    label = "images sampled" if axis == "images" else "seconds"
    return charts.plot(reward, "Mean of a step's samples, and evaluations at fixed seeds.", curves, unit="score", xlabel=label,
                       legend_columns=2)


def positions(rows: Sequence[Row], axis: str) -> list[float]:
    """Where each row lies on an axis; NaN if it does not say."""
    if axis == "images":
        return list(accumulate(row.get("images", 0.0) for row in rows))
    return [row.get(axis, math.nan) for row in rows]


def pairs(
    found: Sequence[Sequence[tuple[int, list[GridImage]]]], names: Sequence[str], rewards: Sequence[str]
) -> list[grids.Pair]:
    """Newest images of both runs at equal prompt and noise."""
    if not all(found):
        return []
    (a_step, a_images), (b_step, b_images) = found[0][0], found[1][0]
    labels = [f"{name}, step {step}" for name, step in zip(names, (a_step, b_step), strict=True)]
    return [grids.Pair(one.prompt, (grids.shot(one, labels[0], rewards), grids.shot(other, labels[1], rewards)))
            for one, other in grids.same_noise(a_images, b_images)[:_PAIRS_SHOWN]]
