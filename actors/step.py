"""One training step in flight: which shards are sampled and scored, and what the learner can be given next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import ray

from actors.scoring import ShardScores
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import MicroBatch, RankWork, StepPlan, micro_steps
from flowgrpo_ray.data.trajectory import GroupScores
from flowgrpo_ray.learning.advantages import needs_whole_step


@dataclass
class _Group:
    conditioning: ray.ObjectRef | None = None
    shards: list[MicroBatch] = field(default_factory=list)  # sampling shards that hold its samples
    scores: dict[int, ShardScores] = field(default_factory=dict)  # its own rows, by sampling shard


@dataclass(frozen=True)
class MicroStep:
    """A learner micro-step that can be issued now: one call per rank."""

    update: int
    work: tuple[RankWork, ...]
    scores: dict[int, GroupScores]  # of groups whose scores the learner does not have yet


class StepBoard:
    """Book-keeping of a step. Refs of what the learner has been given are let go at once."""

    def __init__(self, config: Config, plan: StepPlan, world_size: int) -> None:
        self.plan = plan
        self._config = config
        self._groups = [_Group(shards=plan.micro_batches_of(group)) for group in range(len(plan.groups))]
        self._trajectories: dict[MicroBatch, ray.ObjectRef] = {}
        self._waiting = list(plan.shards)  # for a conditioning
        self._whole_step = needs_whole_step(config) or config.train.on_ratio_mismatch == "recompute"
        self._told: set[int] = set()
        self._updates = [micro_steps(plan.train_micro_batches(u), world_size) for u in range(len(plan.updates))]
        self._position = (0, 0)  # (update, micro-step) to issue next
        self._shards_left = len(plan.shards)
        self._world_size, self._answers = world_size, 0
        self.complete: dict[int, GroupScores] = {}
        self.dropped_groups = 0
        self.trajectory_bytes = 0
        self._nbytes: dict[MicroBatch, int] = {}

    def encoded(self, group: int, conditioning: ray.ObjectRef) -> list[MicroBatch]:
        """Take a group's conditioning; returns the shards that can be sampled now, each once."""
        self._groups[group].conditioning = conditioning
        complete = [shard for shard in self._waiting if all(self._groups[g].conditioning is not None for g in shard.groups)]
        self._waiting = [shard for shard in self._waiting if shard not in complete]
        return complete

    def conditionings(self, shard: MicroBatch) -> list[ray.ObjectRef]:
        """Conditioning of each of the shard's groups, in order."""
        refs = []
        for group in shard.groups:
            ref = self._groups[group].conditioning
            assert ref is not None  # all are there when a shard is sampled
            refs.append(ref)
        return refs

    def sampled(self, shard: MicroBatch, trajectory: ray.ObjectRef, trajectory_bytes: int) -> None:
        self._trajectories[shard] = trajectory
        self._shards_left -= 1
        self.trajectory_bytes += trajectory_bytes
        self._nbytes[shard] = trajectory_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the trajectories that are not given up yet."""
        return sum(self._nbytes[shard] for shard in self._trajectories)

    @property
    def all_sampled(self) -> bool:
        return self._shards_left == 0

    def scored(self, shard: MicroBatch, scores: ShardScores) -> None:
        """Take a shard's scores; a group is complete with its last one."""
        size = len(shard.samples)
        for place, number in enumerate(shard.groups):
            rows = slice(place * size, (place + 1) * size)
            own = ShardScores({key: values[rows] for key, values in scores.scores.items()}, scores.valid[rows],
                              scores.dropped[rows])
            self._scored(number, shard.shard, own)

    def _scored(self, number: int, shard: int, scores: ShardScores) -> None:
        group = self._groups[number]
        group.scores[shard] = scores
        if len(group.scores) < len(group.shards):
            return
        parts = [group.scores[i] for i in range(len(group.shards))]
        keys = dict.fromkeys(key for part in parts for key in part.scores)
        valid = np.concatenate([part.valid for part in parts])
        if any(part.dropped.any() for part in parts):
            valid[:] = False
            self.dropped_groups += 1
        rewards = {
            key: np.concatenate([part.scores.get(key, np.full(len(part.valid), np.nan)) for part in parts]) for key in keys
        }
        self.complete[number] = GroupScores(rewards, valid)

    def trained(self) -> None:
        """A rank has answered for a micro-step."""
        self._answers += 1

    def queue(self) -> dict[str, int]:
        """Groups that the learner is not through with, by the stage that they are in."""
        counts = dict.fromkeys(("encoding", "sampling", "scoring", "learning"), 0)
        work = [ranks for update in self._updates for ranks in update][self._answers // self._world_size :]
        for number in {number for ranks in work for item in ranks for number in item.shard.groups}:
            group = self._groups[number]
            if number in self.complete:
                counts["learning"] += 1
            elif group.conditioning is None:
                counts["encoding"] += 1
            elif any(shard not in self._trajectories for shard in group.shards):
                counts["sampling"] += 1
            else:
                counts["scoring"] += 1
        return counts

    def ready_micro_steps(self) -> Iterator[MicroStep]:
        """Micro-steps of the current update whose groups are complete, in plan order; stops at the update's end."""
        while self._position[1] < len(self._updates[self._position[0]]):
            update, t = self._position
            work = self._updates[update][t]
            needed = set(range(len(self.plan.groups))) if self._whole_step else {
                group for item in work for group in item.shard.groups}
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
        left = {group for update in self.plan.updates[self.update :] for group in update}
        self._trajectories = {shard: ref for shard, ref in self._trajectories.items() if left & set(shard.groups)}

    def later_micro_steps(self) -> Iterator[tuple[RankWork, ...]]:
        """Micro-steps of all updates after the first, whose old log-probs are recomputed before it is applied."""
        for update in self._updates[1:]:
            yield from update

    def arguments(self, work: RankWork) -> tuple[ray.ObjectRef, ...]:
        """Conditioning of each group of the shard, and the trajectories that hold its samples."""
        return (*self.conditionings(work.shard), *(self._trajectories[s] for s in self.plan.sources(work.shard)))
