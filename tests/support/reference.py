"""Training in one plain loop in one process: the same library functions and shapes as the actors use, and no Ray.

What a run on Ray gives is compared with it, bit for bit. The pieces of the loop serve the tests of learner and sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowgrpo_ray.config.load import Config, from_tree
from flowgrpo_ray.data.plan import MicroBatch, RankWork, StepPlan, micro_steps, plan_step
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays, GroupScores, SampleRequest, Trajectory
from flowgrpo_ray.device import configure_process
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.policies import load_policy, lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.lora import LoraSettings
from flowgrpo_ray.policies.slots import AdapterSlots
from flowgrpo_ray.rewards import Reward, get
from flowgrpo_ray.rewards.base import validated
from flowgrpo_ray.run_dir.recorder import step_row
from flowgrpo_ray.sampling.sampler import Sampler

RUN_ID = "reference"
JPEG = "jpeg_compressibility"
Row = dict[str, float]

SMALL: dict[str, Any] = {
    "model": {"use_t5": False, "max_sequence_length": 1},
    "lora": {"rank": 4},
    "rewards": {JPEG: {}},
    "sampling": {"height": 32, "width": 64, "num_steps": 4, "group_size": 4, "groups_per_step": 2, "micro_batch": 2},
    "train": {"learning_rate": 1e-3, "ema": {"every_updates": 1}},
}
RECORDS = [PromptRecord(f'the word "{word}"', line=i + 1) for i, word in enumerate(("CAT", "OWL", "FOX", "BEE", "ANT"))]


def small(**sections: Mapping[str, Any]) -> Config:
    """A configuration that trains a step in about a second; `sections` are laid over it, section by section."""
    tree = {name: dict(section) for name, section in SMALL.items()}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return from_tree(tree)


def load(config: Config, parts: str = "all") -> tuple[Policy, LoraSettings]:
    """The policy with its adapter attached, as an actor loads it."""
    device = configure_process(on_gpu=False, cpu_threads=config.model.cpu_threads)
    policy = load_policy(config.model, device=device, parts=parts)
    return policy, lora.attach(policy, config.lora, config.train.seed)


# One training step, taken apart ---------------------------------------------------------------------------------------


@dataclass
class StepData:
    """What a step's sampling and scoring gave: all that a learner is given, by group index."""

    conditionings: dict[int, Arrays]
    negatives: dict[int, Arrays | None]
    trajectories: dict[int, list[Trajectory]]  # of the sampling shards that begin with a group
    scores: dict[int, GroupScores]

    def arguments(self, plan: StepPlan, work: RankWork) -> tuple[Any, ...]:
        """Arguments of `Learner.accumulate` after the shard: negative conditioning, that of its groups, and the
        trajectories that hold the shard's samples."""
        groups, wanted = work.shard.groups, set(work.shard.rows)
        parts = [self.trajectories[s.group][s.shard] for s in plan.shards if wanted & set(s.rows)]
        return self.negatives[groups[0]], *(self.conditionings[group] for group in groups), *parts


def training_request(
    config: Config, plan: StepPlan, shard: MicroBatch, run_id: str = RUN_ID, **changes: Any
) -> SampleRequest:
    """The request of a training shard."""
    s, group = config.sampling, plan.groups[shard.group]
    request = SampleRequest(
        run_id=run_id, slot="policy", version=group.version,
        noise_keys=tuple((config.train.seed, plan.step, number, sample)
                         for number in shard.groups for sample in shard.samples),
        stream="train", index=tuple(row // len(shard.samples) for row in range(len(shard.rows))),
        height=group.height, width=group.width, num_steps=s.num_steps, guidance_scale=s.guidance_scale, window=group.window,
        shared_initial_noise=s.shared_initial_noise)
    return replace(request, **changes)


def sample_step(
    config: Config, plan: StepPlan, sampler: Sampler, rewards: Mapping[str, Reward], run_id: str = RUN_ID
) -> StepData:
    """Encode, sample and score a step: one prompt per encode, one shard per sample and per score."""
    data, encoded = StepData({}, {}, {}, {}), {}
    columns: dict[int, dict[str, list[np.ndarray]]] = {}
    for group in plan.groups:
        data.negatives[group.group] = None
        if config.sampling.guidance_scale > 1:
            own = group.record.negative_prompt
            text = config.data.negative_prompt if own is None else own
            if text not in encoded:
                encoded[text] = sampler.encode(PromptRecord(prompt=text))
            data.negatives[group.group] = encoded[text]
        data.conditionings[group.group] = sampler.encode(group.record)
    for shard in plan.shards:
        request = training_request(config, plan, shard, run_id)
        conditionings = [data.conditionings[group] for group in shard.groups]
        _, images, trajectory = sampler.sample(request, data.negatives[shard.group], *conditionings)
        data.trajectories.setdefault(shard.group, []).append(trajectory)
        records = [plan.groups[group].record for group in shard.groups for _ in shard.samples]
        for name, reward in rewards.items():
            answer = reward.score(images, [r.prompt for r in records], [r.metadata for r in records])
            for key, values in validated(answer, len(images), name).items():
                for group, own in zip(shard.groups, np.split(values, len(shard.groups)), strict=True):
                    columns.setdefault(group, {}).setdefault(key, []).append(own)
    for group, parts in columns.items():
        scores = {key: np.concatenate(values) for key, values in parts.items()}
        data.scores[group] = GroupScores(scores, np.ones(config.sampling.group_size, dtype=bool))
    return data


def rank_work(plan: StepPlan, update: int, rank: int = 0, world_size: int = 1) -> Iterator[RankWork]:
    """What one rank is given in an update, in order."""
    for row in micro_steps(plan.train_micro_batches(update), world_size):
        yield row[rank]


def learn_step(
    learner: Learner, plan: StepPlan, data: StepData, *, rank: int = 0, world_size: int = 1
) -> list[Row]:
    """All updates of a step; the metrics of each."""
    learner.begin_step(plan)
    learner.add_scores(data.scores)
    updates = []
    for update in range(len(plan.updates)):
        for work in rank_work(plan, update, rank, world_size):
            learner.accumulate(work, *data.arguments(plan, work))
        if update == 0 and learner.config.train.on_ratio_mismatch == "recompute":
            for later in range(1, len(plan.updates)):
                for work in rank_work(plan, later, rank, world_size):
                    learner.recompute(work, *data.arguments(plan, work))
        updates.append(learner.apply())
    return updates


# The whole run --------------------------------------------------------------------------------------------------------


class Reference:
    """One policy, a sampler and a learner on it, taking turns."""

    def __init__(self, config: Config, rewards: Mapping[str, Reward], run_id: str = RUN_ID) -> None:
        self.config, self.rewards, self.run_id = config, rewards, run_id
        self.policy, self.settings = load(config)
        self.learner = Learner(self.policy, config, run_id=run_id)
        self.sampler = Sampler(self.policy, config, AdapterSlots(self.policy))
        self.version = -1

    def publish(self, version: int) -> Row:
        """Name the learner's weights a version, and prove it as the actors do."""
        info, _, _ = self.learner.export(version)
        reply = self.sampler.slots.adopt("policy", version)
        assert (reply.digest, reply.bound) == (info.digest, info.tensors)
        assert info.changed < 0 or reply.previous < 0 or reply.changed == info.changed
        self.version = version
        return info.norms

    def sample(self, plan: StepPlan) -> StepData:
        return sample_step(self.config, plan, self.sampler, self.rewards, self.run_id)

    def step(self, records: Sequence[PromptRecord], step: int) -> Row:
        """Sample, score, learn and publish one step (0-based)."""
        if self.version != step:
            self.publish(step)
        plan = plan_step(self.config, records, step)
        data = self.sample(plan)
        updates = learn_step(self.learner, plan, data)
        advantages = self.learner.step_advantages()
        scored = step_row(self.config, plan, data.scores, advantages)
        return {"step": step + 1, **merged(updates), **scored, **self.publish(step + 1)}


SUMS = ("valid_samples", "masked_samples", "nonzero_advantages")
TOTALS = ("updates", "skipped_updates", "idle_updates", "ema_decay", "loss_scale")


def merged(updates: list[Row]) -> Row:
    """One row from the updates of a step: counts are added, totals are the last's, the gate is the first's, the others
    are means; without times."""
    row: Row = {}
    for key, first in updates[0].items():
        values = [update[key] for update in updates]
        if key in SUMS:
            row[key] = sum(values)
        elif key in TOTALS:
            row[key] = values[-1]
        elif key == "first_update_log_ratio_max":
            row[key] = first
        elif key not in ("seconds", "cpu_seconds"):
            row[key] = sum(values) / len(values)
    return row


def train_reference(
    config: Config, records: Sequence[PromptRecord], steps: int, reward: Reward | Mapping[str, Reward], *,
    start_step: int = 0, state: tuple[dict[str, Arrays], dict[str, Any]] | None = None, run_id: str = RUN_ID,
) -> tuple[Arrays, Arrays, list[Row]]:
    """Train up to step `steps` and return the adapter, the EMA adapter, and a row of metrics per step.

    `start_step` and `state` (of `Learner.state`) go on with a run that was stopped after `start_step` steps.
    """
    rewards = reward if isinstance(reward, Mapping) else {reward.name: reward}
    run = Reference(config, rewards, run_id)
    if state is not None:
        run.learner.load_state(*state)
    rows = [run.step(records, step) for step in range(start_step, steps)]
    return run.learner.adapter(), run.learner.ema_adapter(), rows


# For tests of one learner ---------------------------------------------------------------------------------------------


def configuration(**sections: Mapping[str, Any]) -> Config:
    """`small`, with gradients that are not clipped."""
    return small(**{**sections, "train": {"learning_rate": 1e-3, "max_grad_norm": 1e9, "ema": {"every_updates": 1},
                                          **sections.get("train", {})}})


def perturbed(policy: Policy) -> Arrays:
    """The policy's adapter, changed so that it does something: B is no longer 0."""
    generator = np.random.default_rng(0)
    return {key: value + generator.normal(0, 0.02, value.shape).astype(np.float32)
            for key, value in lora.read_state(policy).items()}


class Bench:
    """One policy for many tests: each gets a new learner at the same starting adapter, and samples of it. `base` is the
    same model with an adapter that does nothing."""

    def __init__(self) -> None:
        self.policy, self.settings = load(configuration())
        self.base = load(configuration(), parts="learner")[0]
        self.adapter = perturbed(self.policy)
        lora.write_state(self.base, {key: np.zeros_like(value) for key, value in self.adapter.items()})
        self._sampled: dict[str, StepData] = {}

    def start(self, config: Config) -> tuple[Learner, StepPlan, StepData]:
        """A new learner at the starting adapter, the plan of step 0, and its samples."""
        slots = AdapterSlots(self.policy)
        slots.load("policy", 0, self.adapter)
        plan = plan_step(config, RECORDS, 0)
        key = config.sampling.model_dump_json() + config.data.negative_prompt
        if key not in self._sampled:
            sampler, rewards = Sampler(self.policy, config, slots), {JPEG: get(JPEG)}
            self._sampled[key] = sample_step(config, plan, sampler, rewards)
        return Learner(self.policy, config, run_id=RUN_ID), plan, self._sampled[key]


def run_update(
    learner: Learner, plan: StepPlan, data: StepData, update: int = 0, first: Sequence[RankWork] = ()
) -> tuple[Row, Arrays]:
    """(metrics, gradients as the optimizer got them; empty where it did not step) of one update; the shards in `first`
    are accumulated before its own."""
    gradients: Arrays = {}
    hook = learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({key: p.grad.numpy().copy() for key, p in learner.parameters.items()}))
    if update == 0:
        learner.begin_step(plan)
        learner.add_scores(data.scores)
    for work in [*first, *rank_work(plan, update)]:
        learner.accumulate(work, *data.arguments(plan, work))
    metrics = learner.apply()
    hook.remove()
    return metrics, gradients


def with_scores(data: StepData, change: Callable[..., tuple[np.ndarray, np.ndarray]]) -> StepData:
    """The same samples with other scores: change(group, rewards, valid) -> (rewards, valid)."""
    scores = {}
    for group, s in data.scores.items():
        rewards, valid = change(group, s.rewards[JPEG].copy(), s.valid.copy())
        scores[group] = GroupScores({JPEG: rewards}, valid)
    return replace(data, scores=scores)
