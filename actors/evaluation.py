"""Evaluation: images by ODE at fixed seeds, on the rollout and reward actors.

Rewards of whole groups take no part: what they say compares samples of a group, and nothing is known of an image alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import ray

from actors.sampling import Sampling
from actors.scoring import Scoring, ShardScores
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import EvalMicroBatch, noise_seed, plan_evaluation
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import SampleMeta, SampleRequest
from flowgrpo_ray.run_dir.sample_table import GridImage
from flowgrpo_ray.sampling.requests import evaluation_keys, evaluation_negative, evaluation_request

log = logging.getLogger(__name__)

ORDER = 1 << 40  # after all training work
KEPT_SHARE = 0.1  # of the cluster's object store, for the conditionings of evaluation prompts


class KeptConditionings:
    """Conditionings of evaluation prompts, by place in their file, kept for the evaluations that follow.

    Args:
        budget: bytes; what would go beyond is not kept, and is encoded again each time.
    """

    def __init__(self, budget: float) -> None:
        self._budget, self.nbytes = budget, 0
        self._kept: dict[int, tuple[ray.ObjectRef, int]] = {}
        self._told = False

    def __contains__(self, prompt: int) -> bool:
        return prompt in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, prompt: int) -> ray.ObjectRef:
        return self._kept[prompt][0]

    def refs(self) -> dict[int, ray.ObjectRef]:
        return {prompt: ref for prompt, (ref, _) in self._kept.items()}

    def keep(self, prompt: int, ref: ray.ObjectRef, nbytes: int) -> bool:
        """Whether there was room for it."""
        if self.nbytes + nbytes > self._budget:
            return False
        self._kept[prompt] = ref, nbytes
        self.nbytes += nbytes
        return True

    def forget(self, prompts: Sequence[int]) -> None:
        """They were lost, with the node that held them, or that node shall hold them no longer."""
        for prompt in prompts:
            self.nbytes -= self._kept.pop(prompt, (None, 0))[1]

    def tell(self, prompts: int) -> None:
        """Log once what is kept of an evaluation of so many prompts."""
        if not self._told:
            self._told = True
            rest = "" if len(self) == prompts else (
                f"; there is no room for more in {KEPT_SHARE:.0%} of the object store, and the others are encoded again in "
                "each evaluation")
            log.log(logging.INFO if rest else logging.DEBUG, "evaluation: the conditionings of %d of %d prompts are kept, "
                    "%.1f MB%s", len(self), prompts, self.nbytes / 1e6, rest)


@dataclass
class Evaluation:
    """One evaluation in flight; `finished` when every image has its scores."""

    weights: str
    shards: list[EvalMicroBatch]
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
    def _counted(shard: EvalMicroBatch, values: np.ndarray) -> np.ndarray:
        return values[: len(shard.counted)]


def start_evaluation(
    config: Config, records: list[PromptRecord], weights: str, version: int, run_id: str, sampling: Sampling,
    scoring: Scoring, kept: KeptConditionings,
) -> Evaluation:
    """Submit the whole evaluation; drive the pools until it is `finished`."""
    run, position = Evaluation(weights, plan_evaluation(config, records)), 0
    work = _Work(run, config, records, sampling, scoring, kept)
    for shard in run.shards:
        wanted = range(position, min(position + len(shard.counted), config.eval.grid_images))
        position += len(shard.counted)
        request = evaluation_request(config, records, shard, run_id=run_id, slot=weights, version=version, png=len(wanted))
        work.add(shard, request, wanted)
    work.encode()
    return run


@dataclass
class _Shard:
    """A shard that waits for conditionings."""

    plan: EvalMicroBatch
    request: SampleRequest
    wanted: range  # places of its images in the grid
    again: bool  # after a conditioning was lost
    conditionings: dict[int, ray.ObjectRef] = field(default_factory=dict)  # by prompt

    @property
    def order(self) -> tuple[int, int]:
        return ORDER, self.plan.shard


class _Work:
    """What an evaluation does: encode the prompts that are not kept, sample a shard with the last of its own, then score."""

    def __init__(
        self, run: Evaluation, config: Config, records: list[PromptRecord], sampling: Sampling, scoring: Scoring,
        kept: KeptConditionings,
    ) -> None:
        self._run, self._config, self._records = run, config, records
        self._sampling, self._scoring, self._kept = sampling, scoring, kept
        self._waiting: dict[int, list[_Shard]] = {}  # by prompt that is not encoded yet

    def add(self, plan: EvalMicroBatch, request: SampleRequest, wanted: range, *, again: bool = False) -> None:
        """Sample a shard at once, if all its conditionings are kept; else it waits for `encode`."""
        shard = _Shard(plan, request, wanted, again)
        for prompt in plan.prompts:
            if prompt in self._kept:
                shard.conditionings[prompt] = self._kept[prompt]
            else:
                self._waiting.setdefault(prompt, []).append(shard)
        self._sample_if_complete(shard)

    def encode(self) -> None:
        """Encode all prompts that shards wait for."""
        self._encode(list(self._waiting))

    def _encode(self, prompts: list[int]) -> None:
        self._sampling.encode([self._records[p] for p in prompts], [self._waiting[p][0].order for p in prompts],
                              lambda number, ref, nbytes: self._encoded(prompts[number], ref, nbytes))

    def _encoded(self, prompt: int, ref: ray.ObjectRef, nbytes: int) -> None:
        """Hand a conditioning on to the shards that wait for it; to the first of them alone, if there is no room to keep it."""
        shards = self._waiting.pop(prompt)
        if not self._kept.keep(prompt, ref, nbytes) and len(shards) > 1:
            self._waiting[prompt] = shards[1:]
            shards = shards[:1]
            self._encode([prompt])
        for shard in shards:
            shard.conditionings[prompt] = ref
            self._sample_if_complete(shard)

    def _sample_if_complete(self, shard: _Shard) -> None:
        plan = shard.plan
        if len(shard.conditionings) < len(plan.prompts):
            return

        def sampled(meta: SampleMeta, images: ray.ObjectRef, trajectory: ray.ObjectRef) -> None:
            self._run.pngs.update(zip(shard.wanted, meta.pngs, strict=True))
            self._scoring.submit(f"evaluation shard {plan.shard}", shard.order, images,
                                 [self._records[p] for p, _ in plan.items],
                                 lambda scores: self._run.scores.__setitem__(plan.shard, scores),
                                 rewards=self._scoring.of_images)

        def lost() -> None:
            self._kept.forget(plan.prompts)
            self.add(plan, shard.request, shard.wanted, again=True)
            self._encode([p for p in plan.prompts if len(self._waiting.get(p, ())) == 1])  # the others are under way

        conditionings = [shard.conditionings[prompt] for prompt in plan.prompts]
        shard.conditionings.clear()
        self._sampling.sample(f"evaluation shard {plan.shard}", shard.order, shard.request,
                              evaluation_negative(self._config, plan), conditionings, sampled,
                              None if shard.again else lost)
