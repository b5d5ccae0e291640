"""`report.html` of a run: one file without references to anything else, made from what the run directory holds.

It can be made at any time, of a run in progress too; what is not there yet is left out. Prompts, names and
configuration are untrusted text: the template escapes everything.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from flowgrpo_ray import charts, storage
from flowgrpo_ray.metrics import METRICS, Row, find, read_metrics
from flowgrpo_ray.samples import list_grids, read_samples

_TEMPLATES = Path(__file__).parent / "templates"
_GRIDS_SHOWN = 6  # steps at which grids are shown, the first and the last among them
_GRID_WIDTH = 1280  # pixels; wider grids are scaled down and stored as JPEG to keep the page small
_GROUPS_SHOWN = 24


def write_report(run_dir: str) -> str:
    """Build the report of a run directory and write `report.html` into it; returns its URI.

    Raises:
        FlowGrpoError: a file of the run is damaged (it is named).
    """
    return storage.write_bytes(storage.join(run_dir, "report.html"), render(run_dir).encode())


def render(run_dir: str) -> str:
    """The page as text."""
    rows = read_metrics(run_dir)
    config_uri = storage.join(run_dir, "config.yaml")
    config_text = storage.read_bytes(config_uri).decode(errors="replace") if storage.size(config_uri) else ""
    config = _parsed(config_text)
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True)
    environment.filters["number"] = number
    drawn = [(panel.section, charts.draw(rows, panel)) for panel in charts.panels(rows, list(_weights(config)))]
    table = read_samples(run_dir, last_part_only=True)
    rewards = _rewards(table, config)
    return environment.get_template("report.html").render(
        name=_at(config, "run", "name") or storage.base_name(run_dir), place=storage.display(run_dir),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), tiles=tiles(rows, config),
        evaluation=evaluation(rows, config),
        sections=[(section, [chart for _, chart in found]) for section, found in groupby(drawn, key=lambda d: d[0])],
        trouble=any(section == "Trouble" for section, _ in drawn), rows=rows, grids=grids(run_dir),
        groups=newest_groups(table, rewards), rewards=rewards, last=last_values(rows),
        config=storage.redact(config_text), accepted=accepted_changes(run_dir))


def accepted_changes(run_dir: str) -> list[dict[str, Any]]:
    """What resumes changed, as `run.accept_changes` allowed: step, key, old and new value of each, from run.json."""
    uri = storage.join(run_dir, "run.json")
    run = json.loads(storage.read_bytes(uri)) if storage.size(uri) else {}
    return run.get("accepted_changes", []) if isinstance(run, dict) else []


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Comparison:
    """First and last evaluation of one reward under one kind of weights; errors are standard errors of the mean."""

    reward: str
    weights: str
    first_step: int
    first: float
    first_error: float | None
    last_step: int
    last: float
    last_error: float | None
    headline: bool = False  # of the weights that eval.weights names
    direction: int = 0  # 1: training raises the score, -1: it lowers it, 0: a monitor

    @property
    def change(self) -> float:
        return self.last - self.first


def evaluation(rows: Sequence[Row], config: dict[str, Any]) -> list[Comparison]:
    """First against last evaluation, a line per reward and weights; optimised rewards and the headline first."""
    out, headline, weights = [], _at(config, "eval", "weights") or "policy", _weights(config)
    keys = sorted(charts.keys_of(rows, "eval"), key=lambda key: find(key)[1]["weights"] != headline)
    for key in charts.in_order(keys, list(weights)):
        labels = find(key)[1]
        having = [row for row in rows if key in row]
        first, last = having[0], having[-1]
        out.append(Comparison(
            labels["reward"], labels["weights"], int(first["step"]), first[key], _error(first, labels),
            int(last["step"]), last[key], _error(last, labels), labels["weights"] == headline,
            int(math.copysign(1, weight)) if (weight := weights.get(labels["reward"], 0.0)) else 0))
    return out


def _weights(config: dict[str, Any]) -> dict[str, float]:
    """Weight of every reward of the configuration, in its order."""
    rewards = config.get("rewards")
    if not isinstance(rewards, dict):
        return {}
    return {str(name): float((options or {}).get("weight", 1.0)) for name, options in rewards.items()}


def _error(row: Row, labels: dict[str, str]) -> float | None:
    std = row.get(f"eval_std/{labels['weights']}/{labels['reward']}")
    count = row.get(f"eval_images/{labels['weights']}")
    return std / math.sqrt(count) if std is not None and count else None


def tiles(rows: Sequence[Row], config: dict[str, Any]) -> list[Tile]:
    """The numbers at the top of the page."""
    if not rows:
        return []
    step, target = int(rows[-1]["step"]), _at(config, "run", "steps")
    out = [Tile("Step", f"{step}", f"of {target}" if target else "")]
    for line in evaluation(rows, config):
        if line.headline and line.last_step > line.first_step:
            out.append(Tile(f"{line.reward}, evaluation ({line.weights})", number(line.last),
                            f"{_signed(line.change)} since step {line.first_step}"))
    for key in charts.in_order(charts.keys_of(rows, "reward_mean"), list(_weights(config))):
        steps, values = charts.series(rows, key)
        if len(values) > 1:
            out.append(Tile(f"{key.partition('/')[2]}, training", number(values[-1]),
                            f"{_signed(values[-1] - values[0])} since step {int(steps[0])}"))
    speed = charts.series(rows, "images_per_s")[1][-10:]
    if speed:
        out.append(Tile("Images per second", number(sum(speed) / len(speed)), f"mean of the last {len(speed)} steps"))
    images = charts.series(rows, "images")[1]
    if images:
        out.append(Tile("Images sampled", f"{int(sum(images)):,}"))
    failures = {metric.name: sum(rows[-1].get(key, 0.0) for key in charts.keys_of(rows, metric.name))
                for metric in METRICS if metric.machine and metric.kind == "counter"}
    if any(charts.keys_of(rows, name) for name in failures):
        seen = ", ".join(f"{name.replace('_', ' ')} {int(count)}" for name, count in failures.items() if count)
        out.append(Tile("Failures", f"{int(sum(failures.values()))}", seen or "none so far"))
    return out


@dataclass(frozen=True)
class Grid:
    """A grid of samples, as a data URI."""

    weights: str
    step: int
    image: str


def grids(run_dir: str) -> list[tuple[int, list[Grid]]]:
    """Sample grids by step: first, last, and a few steps spread evenly between them."""
    by_step = [(step, list(found)) for step, found in groupby(list_grids(run_dir), key=lambda grid: grid[1])]
    if len(by_step) > _GRIDS_SHOWN:
        places = {round(i * (len(by_step) - 1) / (_GRIDS_SHOWN - 1)) for i in range(_GRIDS_SHOWN)}
        by_step = [by_step[i] for i in sorted(places)]
    return [(step, [Grid(weights, step, _inline(storage.read_bytes(uri))) for weights, _, uri in found[::-1]])
            for step, found in by_step]  # reversed: policy before ema


def _inline(png: bytes) -> str:
    image = Image.open(io.BytesIO(png))
    kind, data = "png", png
    if image.width > _GRID_WIDTH:
        size = (_GRID_WIDTH, max(1, round(image.height * _GRID_WIDTH / image.width)))
        sink = io.BytesIO()
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(sink, "JPEG", quality=88)
        kind, data = "jpeg", sink.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@dataclass(frozen=True)
class GroupRow:
    """One group of the newest step on file."""

    step: int
    prompt: str
    samples: int
    valid: int
    scores: list[tuple[float, float, float] | None]  # (mean, lowest, highest) per reward; None = no score


def newest_groups(table: pa.Table | None, rewards: Sequence[str]) -> list[GroupRow]:
    """The groups of the newest step on file, best first by the first of `rewards`."""
    if table is None:
        return []
    records = table.to_pylist()
    step = max(record["step"] for record in records)
    out = []
    newest = [record for record in records if record["step"] == step]
    for _, found in groupby(newest, key=lambda record: record["group"]):
        group = list(found)
        scores: list[tuple[float, float, float] | None] = []
        for name in rewards:
            values = [r[f"reward:{name}"] for r in group if r["valid"] and r[f"reward:{name}"] is not None]
            scores.append((sum(values) / len(values), min(values), max(values)) if values else None)
        out.append(GroupRow(step, group[0]["prompt"], len(group), sum(r["valid"] for r in group), scores))
    out.sort(key=lambda row: -row.scores[0][0] if row.scores and row.scores[0] else math.inf)
    return out[:_GROUPS_SHOWN]


def _rewards(table: pa.Table | None, config: dict[str, Any]) -> list[str]:
    """Rewards that have a column, those of the configuration first."""
    columns = [name for name in (table.column_names if table is not None else []) if name.startswith("reward:")]
    found, known = [name.removeprefix("reward:") for name in columns], list(_weights(config))
    return [name for name in known if name in found] + [name for name in found if name not in known]


def last_values(rows: Sequence[Row]) -> list[tuple[str, float, int, str, str]]:
    """(key, last value, its step, unit, description) of every metric that occurs, in the order of the table."""
    out = []
    for metric in METRICS:
        for key in charts.keys_of(rows, metric.name):
            row = next(row for row in reversed(rows) if key in row)
            out.append((key, row[key], int(row["step"]), metric.unit, metric.description))
    return out


def number(value: float) -> str:
    """Four significant digits, and thousands apart."""
    if math.isfinite(value) and (abs(value) >= 1e4 or value == int(value)) and abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "−") + number(abs(value))


def _parsed(text: str) -> dict[str, Any]:
    """The configuration as a tree; a text that is none is still shown, so it is no reason to show nothing."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _at(config: dict[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    return part.get(key) if isinstance(part, dict) else None
