"""Evaluation: images by ODE at fixed seeds, on the rollout and reward actors.

Rewards of whole groups take no part: what they say compares samples of a group, and nothing is known of an image alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import ray

from actors.sampling import Sampling
from actors.scoring import Scoring, ShardScores
from flowgrpo_ray.config import Config
from flowgrpo_ray.plan import EvalShard, noise_seed, plan_evaluation
from flowgrpo_ray.prompts import PromptRecord
from flowgrpo_ray.samples import GridImage
from flowgrpo_ray.sampling.requests import evaluation_keys, evaluation_negative, evaluation_request
from flowgrpo_ray.trajectory import SampleMeta, SampleRequest

ORDER = 1 << 40  # after all training work


@dataclass
class Evaluation:
    """One evaluation in flight; `finished` when every image has its scores."""

    weights: str
    shards: list[EvalShard]
    scores: dict[int, ShardScores] = field(default_factory=dict)
    pngs: dict[int, bytes] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return len(self.scores) == len(self.shards)

    def grid(self, config: Config, records: list[PromptRecord]) -> list[GridImage]:
        """The images that came as PNG, with their prompts, seeds and scores, in the order of the evaluation."""
        images = [(shard, row) for shard in self.shards for row in range(len(shard.counted))]
        out = []
        for position, png in sorted(self.pngs.items()):
            shard, row = images[position]
            seed = noise_seed(*evaluation_keys(config, records, shard)[row], "eval", -1)
            scores = {key: float(values[row]) for key, values in self.scores[shard.shard].scores.items()
                      if np.isfinite(values[row])}
            out.append(GridImage(png, records[shard.items[row][0]].prompt, seed, scores))
        return out

    def row(self) -> dict[str, float]:
        """Means and standard deviations over the images that have a score."""
        keys = dict.fromkeys(key for scores in self.scores.values() for key in scores.scores)
        row: dict[str, float] = {}
        valid = np.concatenate([self._counted(s, self.scores[s.shard].valid) for s in self.shards])
        for key in keys:
            values = np.concatenate([
                self._counted(s, self.scores[s.shard].scores.get(key, np.full(len(s.items), np.nan))) for s in self.shards])
            values = values[np.isfinite(values)]
            if len(values):
                row[f"eval/{self.weights}/{key}"] = float(values.mean())
                row[f"eval_std/{self.weights}/{key}"] = float(values.std())
        if not keys:  # every reward is one of whole groups
            return {f"eval_images/{self.weights}": 0.0}
        return row | {f"eval_images/{self.weights}": float(valid.sum()),
                      f"eval_masked/{self.weights}": float((~valid).sum())}

    @staticmethod
    def _counted(shard: EvalShard, values: np.ndarray) -> np.ndarray:
        return values[: len(shard.counted)]


def start_evaluation(
    config: Config, records: list[PromptRecord], weights: str, version: int, run_id: str, sampling: Sampling, scoring: Scoring
) -> Evaluation:
    """Submit the whole evaluation; drive the pools until it is `finished`."""
    run = Evaluation(weights, plan_evaluation(config, records))
    position = 0
    for shard in run.shards:
        wanted = range(position, min(position + len(shard.counted), config.eval.grid_images))
        position += len(shard.counted)
        request = evaluation_request(config, records, shard, run_id=run_id, slot=weights, version=version, png=len(wanted))
        _submit_shard(config, run, shard, request, records, wanted, sampling, scoring)
    return run


def _submit_shard(
    config: Config, run: Evaluation, shard: EvalShard, request: SampleRequest, records: list[PromptRecord], wanted: range,
    sampling: Sampling, scoring: Scoring,
) -> None:
    """Encode the shard's prompts, one call each; with the last of them sample, then score."""
    order = (ORDER, shard.shard)
    conditionings: dict[int, ray.ObjectRef] = {}

    def sampled(meta: SampleMeta, images: ray.ObjectRef, trajectory: ray.ObjectRef) -> None:
        run.pngs.update(zip(wanted, meta.pngs, strict=True))
        scoring.submit(f"evaluation shard {shard.shard}", order, images, [records[p] for p, _ in shard.items],
                       lambda scores: run.scores.__setitem__(shard.shard, scores), rewards=scoring.of_images)

    def encoded(prompt: int) -> Callable[[ray.ObjectRef], None]:
        def take(ref: ray.ObjectRef) -> None:
            conditionings[prompt] = ref
            if len(conditionings) == len(shard.prompts):
                sampling.sample(f"evaluation shard {shard.shard}", order, request, evaluation_negative(config, shard),
                                [conditionings[p] for p in shard.prompts], sampled)
        return take

    for prompt in shard.prompts:
        sampling.encode(records[prompt], order, encoded(prompt))
