"""Whole training steps in one plain loop in one process, phase by phase: what a program without actors does.

    python -m benchmarks.baseline [CONFIG] [KEY=VALUE ...] [--steps 5] [--warmup 1] [--json]

Encode, denoise, decode, score, train and publish follow one another, at the shapes that the plan gives to the actors.
The CPU seconds of a phase are what its work costs when nothing else runs: `benchmarks.whole_step` measures actors by
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.measure import (
    Timing,
    configuration,
    cores,
    device_of,
    machine,
    parser,
    print_machine,
    print_table,
    run_main,
    shown,
    spread,
)
from flowgrpo_ray import device as devices
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import GroupPlan, MicroBatch, StepPlan, micro_steps, plan_step, training_negative
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays, GroupScores, SampleRequest, Trajectory
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.policies import load_policy, lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.slots import AdapterSlots
from flowgrpo_ray.preflight import check
from flowgrpo_ray.rewards import get
from flowgrpo_ray.rewards.base import Reward, validated
from flowgrpo_ray.sampling.requests import sample_request
from flowgrpo_ray.sampling.sampler import Sampler

RUN_ID = "benchmark"
PHASES = ("encode", "denoise", "decode", "score", "train", "publish")
PURE = ("denoise", "decode", "score", "train")  # the work of the algorithm itself


@dataclass
class Work:
    """What sampling a step gave, for the learner."""

    conditionings: dict[int, Arrays] = field(default_factory=dict)  # by group
    negatives: dict[int, Arrays | None] = field(default_factory=dict)
    trajectories: dict[MicroBatch, Trajectory] = field(default_factory=dict)  # by sampling shard

    def sampling(self, shard: MicroBatch) -> tuple[Arrays | None, ...]:
        """Negative conditioning, and that of every group of a shard."""
        return self.negatives[shard.group], *(self.conditionings[group] for group in shard.groups)

    def arguments(self, plan: StepPlan, shard: MicroBatch) -> tuple[Any, ...]:
        """Arguments of `Learner.accumulate` after the training shard itself."""
        return *self.sampling(shard), *(self.trajectories[source] for source in plan.sources(shard))


Scored = dict[MicroBatch, dict[str, np.ndarray]]  # scores of a shard by key


class Clock:
    """Adds up wall and CPU seconds by phase; waits for the device at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.phases: dict[str, Timing] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with devices.Stopwatch(self._device) as watch:
            yield
        before = self.phases.get(name, Timing(0.0, 0.0))
        self.phases[name] = Timing(before.wall + watch.seconds, before.cpu + watch.cpu_seconds)


class Sequential:
    """One policy, a sampler and a learner on it, and the rewards, taking turns."""

    def __init__(
        self, config: Config, policy: Policy, rewards: Mapping[str, Reward], *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.config, self.policy, self.rewards = config, policy, rewards
        self.rank, self.world_size = rank, world_size
        lora.attach(policy, config.lora, config.train.seed)
        self.learner = Learner(policy, config, run_id=RUN_ID, rank=rank, world_size=world_size)
        self.sampler = Sampler(policy, config, AdapterSlots(policy))
        self._negatives: dict[str, Arrays] = {}
        self.publish(0)

    def plan(self, records: Sequence[PromptRecord], step: int) -> StepPlan:
        return plan_step(self.config, records, step)

    def publish(self, version: int) -> None:
        self.learner.export(version)
        self.sampler.slots.adopt("policy", version)

    def bind(self, request: SampleRequest) -> str:
        """Put the weights of a request in place; returns their digest."""
        return self.sampler.slots.bind(request.slot, request.version)

    def gather(self, scores: Scored) -> Scored:
        """The scores of all processes."""
        return scores

    def step(self, records: Sequence[PromptRecord], step: int) -> dict[str, Timing]:
        """One step (0-based, in order); the time of each phase."""
        clock, plan, work = Clock(self.policy.device), self.plan(records, step), Work()
        self.learner.begin_step(plan)
        for group in plan.groups:
            with clock.phase("encode"):
                work.negatives[group.group] = self._negative(group)
                work.conditionings[group.group] = self.sampler.encode(group.record)
        scores = {shard: self._sample(clock, plan, shard, work) for shard in plan.shards[self.rank :: self.world_size]}
        self.learner.add_scores(by_group(self.config, self.gather(scores)))
        with clock.phase("train"):
            self._train(plan, work)
        with clock.phase("publish"):
            self.publish(step + 1)
        return clock.phases

    def _negative(self, group: GroupPlan) -> Arrays | None:
        text = training_negative(self.config, group.record)
        if text is None or not self.policy.uses_cfg(self.config.sampling.guidance_scale):
            return None
        if text not in self._negatives:
            self._negatives[text] = self.sampler.encode(PromptRecord(prompt=text))
        return self._negatives[text]

    def _sample(self, clock: Clock, plan: StepPlan, shard: MicroBatch, work: Work) -> dict[str, np.ndarray]:
        """Sample and score a shard; its trajectory goes into `work`."""
        request, scores = sample_request(self.config, RUN_ID, plan, shard), {}
        with clock.phase("denoise"):
            x, work.trajectories[shard] = self.sampler.denoise(request, self.bind(request), *work.sampling(shard))
        with clock.phase("decode"):
            images = self.policy.decode(x, request.height, request.width)
        with clock.phase("score"):
            records = [plan.groups[group].record for group, _ in shard.rows]
            for name, reward in self.rewards.items():
                answer = reward.score(images, [r.prompt for r in records], [r.reward_metadata for r in records])
                scores |= validated(answer, len(images), name)
        return scores

    def _train(self, plan: StepPlan, work: Work) -> None:
        for update in range(len(plan.updates)):
            for row in micro_steps(plan.train_micro_batches(update), self.world_size):
                item = row[self.rank]
                self.learner.accumulate(item, *work.arguments(plan, item.shard))
            self.learner.apply()


def by_group(config: Config, scored: Scored) -> dict[int, GroupScores]:
    """Scores of shards, put together for the learner."""
    size, columns = config.sampling.group_size, {}
    for shard, scores in scored.items():
        for key, values in scores.items():
            for (group, sample), value in zip(shard.rows, values, strict=True):
                columns.setdefault(group, {}).setdefault(key, np.full(size, np.nan))[sample] = value
    return {group: GroupScores(rewards, np.ones(size, dtype=bool)) for group, rewards in columns.items()}


def summary(rows: Sequence[Mapping[str, Sequence[float]]], images: int, clock: str) -> dict[str, Any]:
    """Figures of steps, each given as (wall, CPU) seconds by phase.

    Returns:
        step_seconds (spread of the wall time of a step), images_per_s, phases (spread of wall and CPU seconds a step by
        phase), pure_core_seconds (sum of the medians of PURE by `clock`, cpu or wall), and the rows themselves.
    """
    phases = {name: {"wall": spread([row[name][0] for row in rows]), "cpu": spread([row[name][1] for row in rows])}
              for name in PHASES}
    total = spread([sum(wall for wall, _ in row.values()) for row in rows])
    return {"images": images, "step_seconds": total, "images_per_s": images / total["median"], "phases": phases,
            "clock": clock, "pure_core_seconds": sum(phases[name][clock]["median"] for name in PURE), "rows": rows}


def measure(config: Config, *, steps: int, warmup: int, device: str = "cpu") -> dict[str, Any]:
    """`summary` of `steps` steps after `warmup`. On a GPU pure work is measured by the wall clock."""
    records = check(config).train
    where = device_of(device, config)
    found = machine(where)
    loop = Sequential(config, load_policy(config.model, device=where),
                      {name: get(name, **reward.options) for name, reward in config.rewards.items()})
    times = [loop.step(records, step) for step in range(warmup + steps)][warmup:]
    rows = [{name: [timing.wall, timing.cpu] for name, timing in row.items()} for row in times]
    images = config.sampling.group_size * config.sampling.groups_per_step
    return {"benchmark": "baseline", "machine": found} | summary(rows, images, "cpu" if where.type == "cpu" else "wall")


def show(result: Mapping[str, Any]) -> None:
    print_machine(result["machine"])
    print_table(["phase", "wall s a step", "CPU s a step"],
                [[name, shown(p["wall"]), shown(p["cpu"])] for name, p in result["phases"].items()])
    print(f"one process, one loop: {shown(result['step_seconds'])} s a step of {result['images']} images, "
          f"{result['images_per_s']:.1f} images/s; pure work {result['pure_core_seconds']:.3f} core-seconds of "
          f"{cores()} cores")


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--steps", type=int, default=5, help="measured steps")
    p.add_argument("--warmup", type=int, default=1, help="steps before them")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")

    def work(options: argparse.Namespace) -> dict[str, Any]:
        return measure(configuration(options.words), steps=options.steps, warmup=options.warmup, device=options.device)

    return run_main(work, p, show, argv)


if __name__ == "__main__":
    raise SystemExit(main())
