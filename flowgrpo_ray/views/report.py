"""`report.html` of a run: one file without references to anything else, made from what the run directory holds.

It can be made at any time, of a run in progress too; what is not there yet is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flowgrpo_ray import storage
from flowgrpo_ray.errors import counted
from flowgrpo_ray.run_dir import watch
from flowgrpo_ray.run_dir.metrics import METRICS, Row, find
from flowgrpo_ray.run_dir.run_data import RunData
from flowgrpo_ray.run_dir.sample_table import read_samples
from flowgrpo_ray.views import charts, grids, page, panels
from flowgrpo_ray.views.page import number, sentence, signed
from flowgrpo_ray.views.status import duration

_GROUPS_SHOWN = 24
_PAIRS_SHOWN = 12
_BEST_SHOWN = 6  # and as many of the worst
_HISTOGRAM_STEPS = 5  # at either end of the run
_PACKAGES_SHOWN = ("flowgrpo-ray", "torch", "diffusers", "ray", "python")


def write_report(run_dir: str) -> str:
    """Build the report of a run directory and write `report.html` into it; returns its URI.

    Raises:
        FlowGrpoError: a file of the run is damaged (it is named).
    """
    return storage.write_bytes(storage.join(run_dir, "report.html"), render(run_dir).encode())


def render(run_dir: str) -> str:
    """The page as text."""
    run = RunData.read(run_dir)
    rows, config, weights = run.rows, run.config, watch.weights_of(run.config)
    drawn = [(panel.section, panels.draw(rows, panel)) for panel in panels.panels(rows, list(weights))]
    table = read_samples(run_dir, ends_only=True)
    rewards = _rewards(table, weights)
    ends = grids.ends(run_dir, run.weights)
    return page.render(
        "report.html", name=run.name, place=storage.display(run_dir), facts=facts(run), resumes=resumes(run),
        notices=notices(run), tiles=tiles(rows, config), headline=panels.headline(rows, config, run.weights),
        losses=watch.losses(rows, config, run.weights), comparable=_comparable(run), weights=weights,
        pairs=pairs(ends, list(weights)), gallery=gallery(ends, config),
        evaluation=evaluation(rows, config), histograms=histograms(table, rewards),
        sections=[(section, [chart for _, chart in found]) for section, found in groupby(drawn, key=lambda d: d[0])],
        trouble=any(section == "Trouble" for section, _ in drawn), rows=rows, grids=grids.whole_grids(run_dir),
        groups=newest_groups(table, rewards), rewards=rewards, last=last_values(rows),
        config=storage.redact(run.config_text), accepted=accepted_changes(run))


def accepted_changes(run: RunData) -> list[dict[str, Any]]:
    """What resumes changed, as `run.accept_changes` allowed: step, key, old and new value of each, from run.json."""
    found = run.identity.get("accepted_changes")
    return found if isinstance(found, list) else []


# What was run ---------------------------------------------------------------------------------------------------------

def facts(run: RunData) -> list[tuple[str, str]]:
    """(label, value): what somebody needs to know to make the run again."""
    out = []
    if (seed := run.at("train", "seed")) is not None:
        out.append(("Seed", str(seed)))
    if run.rows and (total := run.rows[-1].get("time_total")):
        out.append(("Wall time", duration(total)))
    if (model := run.at("model", "path")) is not None:
        out.append(("Model", str(model)))
    if run.starts:
        newest = run.starts[-1]
        if found := newest.get("commit"):
            out.append(("Commit", f"{str(found['id'])[:12]}{', with uncommitted changes' if found.get('dirty') else ''}"))
        versions = newest.get("versions", {})
        out.append(("Versions", ", ".join(f"{name} {versions[name]}" for name in _PACKAGES_SHOWN if name in versions)))
    return out


def resumes(run: RunData) -> list[str]:
    """A line per start of the run, with what differs from the start before it."""
    out = []
    for before, now in zip([None, *run.starts], run.starts, strict=False):
        what = "started" if before is None else f"resumed from step {now.get('step')}"
        text = f"{what} {str(now.get('time', '')).replace('T', ' ').replace('+00:00', ' UTC')}"
        if before is not None:
            old, new = before.get("versions", {}), now.get("versions", {})
            changed = [f"{name} {old.get(name)} → {new.get(name)}" for name in new if old.get(name) != new.get(name)]
            if before.get("commit") != now.get("commit"):
                changed.append("another commit")
            text += f" ({', '.join(changed)})" if changed else ""
        out.append(text)
    return out


def notices(run: RunData) -> list[tuple[str, str]]:
    """("bad" or "look", sentence): what a reader must not miss."""
    out = [("bad", sentence(watch.collapse_text(change, run.config)))
           for change in watch.collapses(run.rows, run.config, run.weights)]
    if run.rows and "stopped" in run.rows[-1]:
        out.append(("bad", f"The run stopped in step {int(run.rows[-1]['step'])}; its row holds the counts that say why."))
    if run.at("advantage", "control") == "shuffled":
        out.append(("look", "Advantages are shuffled (advantage.control): this run is a control and must not learn."))
    if hint := watch.monitor_hint(run.config):
        out.append(("look", sentence(hint)))
    return out


def _comparable(run: RunData) -> bool:
    """Whether any score is known at two times, so that its loss could be."""
    names = [key.split("/", 1)[1] for key in charts.keys_of(run.rows, "reward_mean")]
    return any(watch.training_change(run.rows, name, 0.0) for name in names) or any(
        len(charts.series(run.rows, key)[0]) > 1 for key in charts.keys_of(run.rows, "eval"))


# Scores ---------------------------------------------------------------------------------------------------------------

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
    section = config.get("eval")
    headline = (section.get("weights") if isinstance(section, dict) else None) or "policy"
    out, weights = [], watch.weights_of(config)
    keys = sorted(charts.keys_of(rows, "eval"), key=lambda key: find(key)[1]["weights"] != headline)
    for key in panels.in_order(keys, list(weights)):
        labels = find(key)[1]
        having = [row for row in rows if key in row]
        first, last = having[0], having[-1]
        out.append(Comparison(
            labels["reward"], labels["weights"], int(first["step"]), first[key], _error(first, labels),
            int(last["step"]), last[key], _error(last, labels), labels["weights"] == headline,
            int(math.copysign(1, weight)) if (weight := weights.get(labels["reward"], 0.0)) else 0))
    return out


def _error(row: Row, labels: dict[str, str]) -> float | None:
    std = row.get(f"eval_std/{labels['weights']}/{labels['reward']}")
    count = row.get(f"eval_images/{labels['weights']}")
    return std / math.sqrt(count) if std is not None and count else None


def tiles(rows: Sequence[Row], config: dict[str, Any]) -> list[Tile]:
    """The numbers at the top of the page."""
    if not rows:
        return []
    section = config.get("run")
    step, target = int(rows[-1]["step"]), section.get("steps") if isinstance(section, dict) else None
    out = [Tile("Step", f"{step}", f"of {target}" if target else "")]
    weights = watch.weights_of(config)
    for line in evaluation(rows, config):
        if line.headline and line.last_step > line.first_step and line.direction:
            out.append(Tile(f"{line.reward}, evaluation ({line.weights})", number(line.last),
                            f"{signed(line.change)} since step {line.first_step}"))
    for key in panels.in_order(charts.keys_of(rows, "reward_mean"), list(weights)):
        steps, values = charts.series(rows, key)
        name = key.partition("/")[2]
        if len(values) > 1 and weights.get(name, 0.0 if weights else 1.0) and not any(
                tile.label.startswith(f"{name}, evaluation") for tile in out):
            out.append(Tile(f"{name}, training", number(values[-1]),
                            f"{signed(values[-1] - values[0])} since step {int(steps[0])}"))
    speed = charts.series(rows, "images_per_s")[1][-10:]
    if speed:
        out.append(Tile("Images per second", number(sum(speed) / len(speed)),
                        f"mean of the last {counted(len(speed), 'step')}"))
    images = charts.series(rows, "images")[1]
    if images:
        out.append(Tile("Images sampled", f"{int(sum(images)):,}"))
    failures = {metric.name: sum(rows[-1].get(key, 0.0) for key in charts.keys_of(rows, metric.name))
                for metric in METRICS if metric.machine and metric.kind == "counter"}
    if any(charts.keys_of(rows, name) for name in failures):
        seen = ", ".join(f"{name.replace('_', ' ')} {int(count)}" for name, count in failures.items() if count)
        out.append(Tile("Failures", f"{int(sum(failures.values()))}", seen or "none so far"))
    return out


def histograms(table: pa.Table | None, rewards: Sequence[str]) -> list[charts.Chart]:
    """Scores of all samples of the first steps against those of the last ones, a chart per reward."""
    steps = sorted(set(table["step"].to_pylist())) if table is not None else []
    count = min(_HISTOGRAM_STEPS, len(steps) // 2)
    if table is None or not count:
        return []
    parts = (steps[:count], steps[-count:])
    out = []
    for name in rewards:
        groups = []
        for part in parts:
            mask = pc.and_(pc.is_in(table["step"], pa.array(part)), table["valid"])
            scores = table.filter(mask)[f"reward:{name}"].drop_null().to_pylist()
            if scores:
                groups.append((f"step {part[0]}" if count == 1 else f"steps {part[0]}–{part[-1]}", scores))
        if len(groups) == 2:
            out.append(charts.histogram(name, "Every sample of the first and of the last steps.", groups))
    return out


# Images ---------------------------------------------------------------------------------------------------------------

def pairs(ends: Sequence[tuple[int, list]], rewards: Sequence[str]) -> list[grids.Pair]:
    """Images of the first evaluation beside those of the last one, at the same prompt and noise."""
    if len(ends) < 2:
        return []
    (first, before), (last, after) = ends
    found = grids.same_noise(before, after)
    picked = [found[i * len(found) // _PAIRS_SHOWN] for i in range(_PAIRS_SHOWN)] if len(found) > _PAIRS_SHOWN else found
    return [grids.Pair(a.prompt, (grids.shot(a, f"step {first}", rewards), grids.shot(b, f"step {last}", rewards)))
            for a, b in picked]


@dataclass(frozen=True)
class Gallery:
    """The best and the worst images of the newest grid."""

    step: int
    best: list[grids.Shot]
    worst: list[grids.Shot]


def gallery(ends: Sequence[tuple[int, list]], config: dict[str, Any]) -> Gallery | None:
    """By weighted total; None without images that have scores."""
    if not ends or len(order := grids.ranked(ends[-1][1], config)) < 2:
        return None
    rewards, count = list(watch.weights_of(config)), min(_BEST_SHOWN, len(order) // 2)
    best, worst = ([grids.shot(item, item.prompt, rewards) for _, item in part]
                   for part in (order[:count], order[::-1][:count]))
    return Gallery(ends[-1][0], best, worst)


# Tables ---------------------------------------------------------------------------------------------------------------

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
    step = pc.max(table["step"])
    newest = table.filter(pc.equal(table["step"], step)).to_pylist()
    out = []
    for _, found in groupby(newest, key=lambda record: record["group"]):
        group = list(found)
        scores: list[tuple[float, float, float] | None] = []
        for name in rewards:
            values = [r[f"reward:{name}"] for r in group if r["valid"] and r[f"reward:{name}"] is not None]
            scores.append((sum(values) / len(values), min(values), max(values)) if values else None)
        out.append(GroupRow(step.as_py(), group[0]["prompt"], len(group), sum(r["valid"] for r in group), scores))
    out.sort(key=lambda row: -row.scores[0][0] if row.scores and row.scores[0] else math.inf)
    return out[:_GROUPS_SHOWN]


def _rewards(table: pa.Table | None, known: dict[str, float]) -> list[str]:
    """Rewards that have a column, those of the configuration first."""
    columns = [name for name in (table.column_names if table is not None else []) if name.startswith("reward:")]
    found = [name.removeprefix("reward:") for name in columns]
    return [name for name in known if name in found] + [name for name in found if name not in known]


def last_values(rows: Sequence[Row]) -> list[tuple[str, float, int, str, str]]:
    """(key, last value, its step, unit, description) of every metric that occurs, in the order of the table."""
    out = []
    for metric in METRICS:
        for key in charts.keys_of(rows, metric.name):
            row = next(row for row in reversed(rows) if key in row)
            out.append((key, row[key], int(row["step"]), metric.unit, metric.description))
    return out
