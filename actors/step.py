"""One training step in flight: which shards are sampled and scored, and what the learner can be given next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import ray

from actors.scoring import ShardScores
from flowgrpo_ray.config import Config
from flowgrpo_ray.learning.advantages import needs_whole_step
from flowgrpo_ray.plan import RankShard, ShardPlan, StepPlan, micro_steps
from flowgrpo_ray.trajectory import GroupScores


@dataclass
class _Group:
    conditioning: ray.ObjectRef | None = None
    trajectories: dict[int, ray.ObjectRef] = field(default_factory=dict)  # by sampling shard
    scores: dict[int, ShardScores] = field(default_factory=dict)  # by sampling shard


@dataclass(frozen=True)
class MicroStep:
    """A learner micro-step that can be issued now: one call per rank."""

    update: int
    work: tuple[RankShard, ...]
    scores: dict[int, GroupScores]  # of groups whose scores the learner does not have yet


class StepBoard:
    """Book-keeping of a step. Refs of what the learner has been given are let go at once."""

    def __init__(self, config: Config, plan: StepPlan, world_size: int) -> None:
        self.plan = plan
        self._config = config
        self._groups = [_Group() for _ in plan.groups]
        self._whole_step = needs_whole_step(config) or config.train.on_ratio_mismatch == "recompute"
        self._told: set[int] = set()
        self._updates = [micro_steps(plan.train_shards(u), world_size) for u in range(len(plan.updates))]
        self._position = (0, 0)  # (update, micro-step) to issue next
        self._shards_left = sum(len(group.shards) for group in plan.groups)
        self.complete: dict[int, GroupScores] = {}
        self.dropped_groups = 0
        self.trajectory_bytes = 0

    def encoded(self, group: int, conditioning: ray.ObjectRef) -> None:
        self._groups[group].conditioning = conditioning

    def sampled(self, shard: ShardPlan, trajectory: ray.ObjectRef, trajectory_bytes: int) -> None:
        self._groups[shard.group].trajectories[shard.shard] = trajectory
        self._shards_left -= 1
        self.trajectory_bytes += trajectory_bytes

    @property
    def all_sampled(self) -> bool:
        return self._shards_left == 0

    def scored(self, shard: ShardPlan, scores: ShardScores) -> None:
        """Take a shard's scores; the group is complete with its last one."""
        group, plan = self._groups[shard.group], self.plan.groups[shard.group]
        group.scores[shard.shard] = scores
        if len(group.scores) < len(plan.shards):
            return
        parts = [group.scores[i] for i in range(len(plan.shards))]
        keys = dict.fromkeys(key for part in parts for key in part.scores)
        valid = np.concatenate([part.valid for part in parts])
        if any(part.dropped for part in parts):
            valid[:] = False
            self.dropped_groups += 1
        rewards = {
            key: np.concatenate([part.scores.get(key, np.full(len(part.valid), np.nan)) for part in parts]) for key in keys
        }
        self.complete[shard.group] = GroupScores(rewards, valid)

    def ready_micro_steps(self) -> Iterator[MicroStep]:
        """Micro-steps of the current update whose groups are complete, in plan order; stops at the update's end."""
        while self._position[1] < len(self._updates[self._position[0]]):
            update, t = self._position
            work = self._updates[update][t]
            needed = set(range(len(self.plan.groups))) if self._whole_step else {item.shard.group for item in work}
            if not needed <= self.complete.keys():
                return
            new = sorted(needed - self._told)
            self._told.update(new)
            self._position = (update, t + 1)
            yield MicroStep(update, work, {group: self.complete[group] for group in new})

    @property
    def update_issued(self) -> bool:
        """All micro-steps of the current update have been issued."""
        return self._position[1] == len(self._updates[self._position[0]])

    @property
    def update(self) -> int:
        """The update that is being filled."""
        return self._position[0]

    @property
    def issued(self) -> bool:
        """Everything of the step has been given to the learner."""
        return self._position[0] == len(self._updates)

    def next_update(self) -> None:
        """Go on to the next update, and let go of this one's objects: the learner's calls hold what they still need."""
        for group in self.plan.updates[self.update]:
            self._groups[group] = _Group()
        self._position = (self.update + 1, 0)

    def later_micro_steps(self) -> Iterator[tuple[RankShard, ...]]:
        """Micro-steps of all updates after the first, whose old log-probs are recomputed before it is applied."""
        for update in self._updates[1:]:
            yield from update

    def arguments(self, work: RankShard) -> tuple[ray.ObjectRef, ...]:
        """Conditioning and the trajectories that hold the shard's samples."""
        plan, group = self.plan.groups[work.shard.group], self._groups[work.shard.group]
        wanted = set(work.shard.samples)
        parts = [group.trajectories[s.shard] for s in plan.shards if wanted & set(s.samples)]
        return (group.conditioning, *parts)
