"""Scores to advantages (float64). Every learner rank works them out from the same scores, so nothing is sent around.

A sample is compared with its group: A = (r - mean) / (std + eps), population standard deviation, by group id and never
by prompt text. Masked samples take no part and get 0; so do groups with fewer than 2 valid samples or without spread.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from flowgrpo_ray.config import Config
from flowgrpo_ray.config.schema import AdvantageConfig
from flowgrpo_ray.data.plan import noise_seed
from flowgrpo_ray.data.trajectory import GroupScores
from flowgrpo_ray.errors import ConfigError, nearest

STDS = ("group", "global", "none")
COMBINATIONS = ("sum", "gdpo")
ROUNDING = 1e-12  # a smaller difference, relative to the numbers themselves, is what sums round


def group_advantages(
    rewards: np.ndarray | Sequence[float],
    group_ids: np.ndarray | Sequence[Hashable],
    *,
    std: Literal["group", "global", "none"] | str = "group",
    eps: float = 1e-4,
    valid: np.ndarray | Sequence[bool] | None = None,
    clip: float | None = None,
) -> np.ndarray:
    """A = (r - mean of the group) / (std + eps).

    Args:
        rewards: [n]; what masked samples hold is not read.
        group_ids: [n], equal for samples of one group.
        std: population standard deviation of the group, of all valid samples given ("global"), or none (A = r - mean).
        eps: added to the standard deviation.
        valid: bool [n], False = masked; default all valid.
        clip: advantages are clipped to +- this.

    Returns:
        float64 [n].

    Raises:
        ValueError: lengths differ, or a valid reward is not finite. ConfigError: no such std.
    """
    if std not in STDS:
        raise ConfigError(f"no std is named {std!r}{nearest(std, STDS)}")
    values, mask = _checked(rewards, valid)
    out = np.zeros(len(values))
    whole = values[mask].std() if std == "global" and mask.any() else 0.0
    for members in _groups(group_ids, len(values)):
        members = members[mask[members]]
        group = values[members]
        if _without_spread(group):
            continue
        divisor = {"group": group.std() + eps, "global": whole + eps, "none": 1.0}[std]
        out[members] = (group - group.mean()) / divisor
    return _clip(out, clip)


def combine(
    scores: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    group_ids: np.ndarray | Sequence[Hashable],
    mode: Literal["sum", "gdpo"] | str = "sum",
    valid: np.ndarray | Sequence[bool] | None = None,
    eps: float = 1e-4,
) -> np.ndarray:
    """One number per sample from several rewards. float64 [n], 0 for masked samples.

    sum: the weighted sum of the raw scores, a reward for `group_advantages`.
    gdpo: each reward is normalised in its group, the weighted sum of these is divided by its standard deviation over
    all valid samples given. The result is the advantage already. (The sum's mean is 0 as each group's is, so nothing is
    subtracted, and what has no spread stays exactly 0.)

    Raises:
        ConfigError: no such mode. ValueError: no score for a weight, lengths differ, or a valid score is not finite.
    """
    if mode not in COMBINATIONS:
        raise ConfigError(f"no combination is named {mode!r}{nearest(mode, COMBINATIONS)}")
    used = {name: weight for name, weight in weights.items() if weight != 0}
    missing = [name for name in used if name not in scores]
    if missing or not used:
        raise ValueError(f"no scores of {', '.join(missing) or 'any reward'}; there are {', '.join(scores) or 'none'}")
    total = np.zeros(len(group_ids))
    for name, weight in sorted(used.items()):  # a float sum depends on the order
        values, mask = _checked(scores[name], valid, name)
        if mode == "gdpo":
            values = group_advantages(values, group_ids, eps=eps, valid=mask)
        total += weight * np.where(mask, values, 0.0)
    if mode == "gdpo":
        # What cancels to rounding noise has no spread: dividing by its size would make a signal of it.
        total = np.where(np.abs(total) <= ROUNDING * max(map(abs, used.values())), 0.0, total)
        if total.any():
            total = total / (total[mask].std() + eps)
    return total


class History:
    """Running mean and standard deviation of the reward of each prompt, over all steps so far.

    Welford's update, sample by sample: equal rewards leave the sum of squares at exactly 0.
    """

    def __init__(self) -> None:
        self._stats: dict[int, tuple[int, float, float]] = {}  # count, mean, sum of squared deviations

    def update(self, prompt: int, rewards: np.ndarray) -> None:
        """Add the valid rewards of one group of a prompt (its index in the prompt file)."""
        count, mean, squares = self._stats.get(prompt, (0, 0.0, 0.0))
        for reward in map(float, rewards):
            count += 1
            shift = reward - mean
            mean += shift / count
            squares += shift * (reward - mean)
        self._stats[prompt] = (count, mean, squares)

    def stats(self, prompt: int) -> tuple[int, float, float]:
        """(count, mean, population standard deviation) of a prompt; count 0 where it was never seen."""
        count, mean, squares = self._stats.get(prompt, (0, 0.0, 0.0))
        return count, mean, math.sqrt(squares / count) if count else 0.0

    def state_dict(self) -> dict[str, list[float]]:
        """For JSON: prompt index to [count, mean, sum of squared deviations]."""
        return {str(prompt): list(stats) for prompt, stats in self._stats.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        self._stats = {int(k): (int(count), float(mean), float(sq)) for k, (count, mean, sq) in state.items()}


def needs_whole_step(config: Config) -> bool:
    """Whether a group's advantages depend on the other groups of the step, so that all its scores have to be there."""
    options = config.advantage
    return (options.std == "global" or options.combine == "gdpo" or options.baseline == "history"
            or options.control == "shuffled")


def step_advantages(
    config: Config,
    scores: Mapping[int, GroupScores],
    prompts: Mapping[int, int],
    *,
    step: int,
    history: History | None = None,
) -> dict[int, np.ndarray]:
    """Advantages of groups of one training step, as the configuration says.

    Args:
        config: its `advantage` and `rewards` sections and `train.seed` are read.
        scores: group index to scores. All groups of the step where `needs_whole_step`, else any of them.
        prompts: group index to prompt index.
        step: 0-based training step, for the shuffled control.
        history: the running statistics, needed with baseline history; updated here, in plan order: call once a step.

    Returns:
        group index to float64 [group_size].

    Raises:
        ValueError: no history where one is needed, scores missing, of unequal length, or not finite where valid.
    """
    options = config.advantage
    order = sorted(scores)
    weights = {name: reward.weight for name, reward in config.rewards.items() if reward.weight != 0}
    sizes = [len(scores[group].valid) for group in order]
    ids = np.repeat(order, sizes)
    valid = np.concatenate([np.asarray(scores[group].valid, dtype=bool) for group in order])
    columns = {}
    for name in weights:
        if lacking := [group for group in order if name not in scores[group].rewards]:
            there = ", ".join(scores[lacking[0]].rewards)
            raise ValueError(f"group {lacking[0]} has no scores of {name}; it has {there}")
        columns[name] = np.concatenate([np.asarray(scores[group].rewards[name], dtype=np.float64) for group in order])
    combined = combine(columns, weights, ids, options.combine, valid, options.eps)
    if options.combine == "gdpo":
        advantages = _clip(combined, options.clip_max)
    elif options.baseline == "history":
        if history is None:
            raise ValueError("advantage.baseline history needs the running statistics")
        advantages = _history_advantages(options, combined, ids, valid, prompts, history)
    else:
        advantages = group_advantages(
            combined, ids, std=options.std, eps=options.eps, valid=valid, clip=options.clip_max)
    if options.control == "shuffled":
        rng = np.random.Generator(np.random.Philox(noise_seed(config.train.seed, step, 0, 0, "control", 0)))
        advantages[valid] = rng.permutation(advantages[valid])
    return dict(zip(order, np.split(advantages, np.cumsum(sizes)[:-1]), strict=True))


def _history_advantages(
    options: AdvantageConfig,
    rewards: np.ndarray,
    ids: np.ndarray,
    valid: np.ndarray,
    prompts: Mapping[int, int],
    history: History,
) -> np.ndarray:
    """(r - running mean of the prompt) / (its running std, or the step's, + eps); this step's rewards are in both."""
    groups = list(dict.fromkeys(ids.tolist()))
    for group in groups:
        history.update(prompts[group], rewards[(ids == group) & valid])
    out = np.zeros(len(rewards))
    whole = rewards[valid].std() if valid.any() else 0.0
    for group in groups:
        count, mean, spread = history.stats(prompts[group])
        if count < 2 or spread <= ROUNDING * abs(mean):
            continue
        members = (ids == group) & valid
        divisor = {"group": spread + options.eps, "global": whole + options.eps, "none": 1.0}[options.std]
        out[members] = (rewards[members] - mean) / divisor
    return _clip(out, options.clip_max)


def _checked(rewards: Any, valid: Any, name: str = "reward") -> tuple[np.ndarray, np.ndarray]:
    """float64 values, 0 where masked, and the bool mask."""
    values = np.asarray(rewards, dtype=np.float64)
    mask = np.ones(len(values), dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    if values.ndim != 1 or mask.shape != values.shape:
        raise ValueError(f"{name}: values of the shape {values.shape} with a mask of the shape {mask.shape}")
    values = np.where(mask, values, 0.0)
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: sample {int(np.argmin(np.isfinite(values)))} is valid but not finite; mask it")
    return values, mask


def _groups(group_ids: Any, count: int) -> list[np.ndarray]:
    """Indices of each group's samples, groups in order of first appearance."""
    ids = group_ids.tolist() if isinstance(group_ids, np.ndarray) else list(group_ids)
    if len(ids) != count:
        raise ValueError(f"{count} rewards with {len(ids)} group ids")
    places: dict[Hashable, list[int]] = {}
    for place, group in enumerate(ids):
        places.setdefault(group, []).append(place)
    return [np.array(place) for place in places.values()]


def _without_spread(group: np.ndarray) -> bool:
    """No two rewards differ by more than a weighted sum rounds; a mean of equals may miss them by a bit."""
    return len(group) < 2 or bool(np.ptp(group) <= ROUNDING * np.abs(group).max())


def _clip(advantages: np.ndarray, clip: float | None) -> np.ndarray:
    return advantages if clip is None else np.clip(advantages, -clip, clip)
