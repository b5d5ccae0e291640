"""What a run gains and what it loses: scores that fell, and a reward that collapses while the whole rises.

The functions take rows of metrics and plain numbers, so that a driver can ask during a run and a report afterwards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo_ray.errors import counted
from flowgrpo_ray.run_dir.metrics import Row

log = logging.getLogger(__name__)

COLLAPSE_SHARE = 0.3  # an optimised reward that loses more than this share of its start has collapsed
STANDARD_ERRORS = 2.0  # a change counts if it is larger than so many standard errors
_WINDOW = 3  # steps, at least, that the start and the end of a training curve are the mean of
_EPS = 1e-4  # keeps the scale of a constant reward above 0, as advantage.eps does


@dataclass(frozen=True)
class Change:
    """First and last mean of one score, seen from what training wants: of a negative weight a rise is a loss.

    `source` is "evaluation" or "training"; `error` is the standard error of the difference; `scale` is what the loss is
    measured in: the larger of the start's magnitude and the standard deviation of the samples at the start.
    """

    name: str
    source: str
    weight: float
    first: float
    last: float
    error: float
    scale: float
    spread: float  # standard deviation inside a group at the start, where known, else that of all samples
    first_step: int
    last_step: int

    @property
    def gain(self) -> float:
        """Positive is the right direction; a monitor counts as a reward of weight 1."""
        return (self.last - self.first) * (-1.0 if self.weight < 0 else 1.0)

    @property
    def lost_share(self) -> float:
        """What was lost, as a share of `scale`; 0 if nothing was."""
        return max(0.0, -self.gain) / self.scale if self.scale else 0.0

    @property
    def fell(self) -> bool:
        """It got worse by more than noise explains."""
        return -self.gain > STANDARD_ERRORS * self.error and self.lost_share > 0.01


def weights_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Weight of every reward of a plain configuration tree, in its order."""
    rewards = config.get("rewards")
    if not isinstance(rewards, dict):
        return {}
    return {str(name): float((options or {}).get("weight", 1.0)) for name, options in rewards.items()}


def combine_of(config: Mapping[str, Any]) -> str:
    """`advantage.combine` of a plain configuration tree."""
    section = config.get("advantage")
    return str(section.get("combine", "sum")) if isinstance(section, dict) else "sum"


def evaluation_change(rows: Sequence[Row], name: str, weight: float, of: str = "policy") -> Change | None:
    """First against last evaluation under one kind of weights; None before the second one."""
    having = [row for row in rows if math.isfinite(row.get(f"eval/{of}/{name}", math.nan))]
    if len(having) < 2:
        return None
    first, last = having[0], having[-1]
    start, spread = first[f"eval/{of}/{name}"], first.get(f"eval_std/{of}/{name}", 0.0)
    errors = [row.get(f"eval_std/{of}/{name}", 0.0) / math.sqrt(max(row.get(f"eval_images/{of}", 1.0), 1.0))
              for row in (first, last)]
    groups = [row[key] for row in rows if (key := f"reward_group_std/{name}") in row]
    return Change(name, "evaluation", weight, start, last[f"eval/{of}/{name}"], math.hypot(*errors),
                  max(abs(start), spread), groups[0] if groups else spread, int(first["step"]), int(last["step"]))


def training_change(rows: Sequence[Row], name: str, weight: float) -> Change | None:
    """The first tenth of the training steps (at least three) against the last; None if they would overlap."""
    having = [row for row in rows if math.isfinite(row.get(f"reward_mean/{name}", math.nan))]
    window = max(_WINDOW, len(having) // 10)
    if len(having) < 2 * window:
        return None
    parts = having[:window], having[-window:]
    means = [[row[f"reward_mean/{name}"] for row in part] for part in parts]
    start, end = (sum(values) / window for values in means)
    error = math.sqrt(sum(sum((v - m) ** 2 for v in values) / (window - 1) / window
                          for values, m in zip(means, (start, end), strict=True)))
    std = mean(row.get(f"reward_std/{name}", 0.0) for row in parts[0])
    group_std = mean(row.get(f"reward_group_std/{name}", std) for row in parts[0])
    return Change(name, "training", weight, start, end, error, max(abs(start), std), group_std,
                  int(parts[0][0]["step"]), int(parts[1][-1]["step"]))


def combined_gain(changes: Sequence[Change], combine: str) -> float:
    """What the optimised rewards gained together: `sum` adds weighted scores; `gdpo` normalises each reward, so each
    change counts in units of that reward's own spread inside a group at the start."""
    return sum(abs(c.weight) * c.gain / (c.spread + _EPS if combine == "gdpo" else 1.0) for c in changes)


def total_series(rows: Sequence[Row], config: Mapping[str, Any], of: str | None = None) -> tuple[list[float], list[float]]:
    """(steps, values) of what is optimised as a whole: of training, or of the evaluation of one kind of weights.

    `sum`: weighted scores, added. `gdpo`: what each reward gained since its start, in units of its own spread inside a group
    at the start, weighted and added; it begins at 0.
    """
    weights = {name: weight for name, weight in weights_of(config).items() if weight}
    keys = {name: f"reward_mean/{name}" if of is None else f"eval/{of}/{name}" for name in weights}
    having = [row for row in rows if all(math.isfinite(row.get(key, math.nan)) for key in keys.values())]
    if not weights or not having:
        return [], []
    starts, spreads = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 1.0)
    if combine_of(config) == "gdpo" and list(weights.values()) != [1.0]:
        starts = {name: having[0][key] for name, key in keys.items()}
        spreads = {name: _EPS + next((row[key] for row in rows if (key := f"reward_group_std/{name}") in row), 1.0)
                   for name in weights}
    values = [sum(weight * (row[keys[name]] - starts[name]) / spreads[name] for name, weight in weights.items())
              for row in having]
    return [row["step"] for row in having], values


def collapses(rows: Sequence[Row], config: Mapping[str, Any], of: str = "policy") -> list[Change]:
    """Optimised rewards that collapsed: the held-out or the training mean lost more than `COLLAPSE_SHARE` of its scale and
    more than noise explains, while what is optimised as a whole rose. One entry per reward, the evaluation's first."""
    weights = {name: weight for name, weight in weights_of(config).items() if weight}
    found: dict[str, Change] = {}
    for changes in ([evaluation_change(rows, name, weight, of) for name, weight in weights.items()],
                    [training_change(rows, name, weight) for name, weight in weights.items()]):
        known = [change for change in changes if change is not None]
        if len(known) < 2 or combined_gain(known, combine_of(config)) <= 0:
            continue
        for change in known:
            if change.fell and change.lost_share > COLLAPSE_SHARE:
                found.setdefault(change.name, change)
    return list(found.values())


def losses(rows: Sequence[Row], config: Mapping[str, Any], of: str = "policy") -> list[Change]:
    """Every score, optimised or monitored, that got worse by more than noise explains: by evaluation if there are two, else
    in training. The largest loss comes first."""
    weights = weights_of(config)
    names = dict.fromkeys([*weights, *(key.split("/", 2)[2] for row in rows for key in row if key.startswith(f"eval/{of}/")),
                           *(key.split("/", 1)[1] for row in rows for key in row if key.startswith("reward_mean/"))])
    changes = [evaluation_change(rows, name, weights.get(name, 0.0), of) or training_change(rows, name, weights.get(name, 0.0))
               for name in names]
    return sorted((c for c in changes if c is not None and c.fell), key=lambda c: -c.lost_share)


def collapse_text(change: Change, config: Mapping[str, Any]) -> str:
    """One sentence on a collapse, and what to do."""
    others = [name for name, weight in weights_of(config).items() if weight and name != change.name]
    remedy = (f"gdpo gives each reward the same say, however little it varies: lower the weight of "
              f"{' or '.join(others)}, or raise that of {change.name}" if combine_of(config) == "gdpo" else
              f"lower the weight of {' or '.join(others)}, raise that of {change.name}, or compare their ranges")
    return (f"the optimised reward {change.name} collapses: {change.source} mean {change.first:.4g} at step "
            f"{change.first_step}, {change.last:.4g} at step {change.last_step}, while the rewards together rise; {remedy}")


def monitor_hint(config: Mapping[str, Any]) -> str | None:
    """A recommendation for a run that measures nothing but the one reward that it optimises; None for all others."""
    weights = weights_of(config)
    if len(weights) != 1:
        return None
    (name, options), = config["rewards"].items()
    kind = (options or {}).get("type") or ("" if (options or {}).get("python") else name)
    monitor, what = {
        "ocr": ("reader: {type: ocr, weight: 0, every_steps: 5, options: {mode: full}}", "a second reader"),
        "pickscore": ("clipscore: {weight: 0, every_steps: 5}", "how well images fit their prompts"),
    }.get(kind, ("jpeg_compressibility: {weight: 0}", "the loss of detail, and needs no model"))
    return (f"{name} is the only reward and nothing else is measured, so a reward that is being fooled looks like success; add "
            f"a monitor (weight 0), for example `{monitor}`, which shows {what}")


def flat_text(rows: Sequence[Row]) -> str | None:
    """What to say if no group of the last steps had scores that differ; None if one had, or too few steps are done."""
    shares = [row["zero_std_group_fraction"] for row in rows if "zero_std_group_fraction" in row][-_WINDOW:]
    if len(shares) < _WINDOW or min(shares) < 1.0:
        return None
    return (f"in the last {counted(_WINDOW, 'step')} all images of each group had equal scores, so nothing is learned: the "
            "reward does not see differences, or the prompts are solved or too hard (`flowgrpo-ray doctor` shows the spread of "
            "each reward)")


class Watch:
    """Warns during a run when nothing is learned, and, once per reward, when an optimised reward collapses.

    Args:
        config: plain configuration tree.
        rows: rows of the run so far, for a run that resumes.
    """

    def __init__(self, config: Mapping[str, Any], rows: Iterable[Row] = ()) -> None:
        self.config, self.rows = config, list(rows)
        self._warned = {change.name for change in collapses(self.rows, config)}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        for change in collapses(self.rows, self.config):
            if change.name not in self._warned:
                self._warned.add(change.name)
                log.warning("%s", collapse_text(change, self.config))
        text = flat_text(self.rows)
        if text is not None and flat_text(self.rows[:-1]) is None:
            log.warning("%s", text)


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean of at least one value."""
    known = list(values)
    return sum(known) / len(known)
