"""The plan: (seed, step) to groups, shards, windows and noise seeds. A pure function of the configuration.

Who does the work, in which order, and how often it must be done again change nothing here, so they change nothing in
the result. Bits depend on batch shape: every piece of work has the shape that the plan gives it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flowgrpo_ray.config.load import Config, divisors
from flowgrpo_ray.data.prompts import PromptRecord


def noise_seed(seed: int, step: int, group: int, sample: int, stream: str, step_index: int) -> int:
    """Seed of one sample's noise at one denoising step: the first 8 bytes of a sha256, masked to 63 bits.

    `step_index` -1 is the initial latent. Counter-based: no state, so a retry on another actor draws the same noise.
    """
    text = f"{seed}/{step}/{group}/{sample}/{stream}/{step_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") & (2**63 - 1)


def _rng(*key: object) -> np.random.Generator:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "big")))


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    return _rng("prompts", seed, epoch).permutation(count)


def prompt_index(seed: int, position: int, count: int) -> int:
    """Which of `count` prompts the `position`-th group of the run gets: shuffled by (seed, epoch), no replacement."""
    epoch, place = divmod(position, count)
    return int(_epoch_order(seed, epoch, count)[place])


@dataclass(frozen=True)
class MicroBatch:
    """Unit of work: the same `samples` (indices within the group) of every group in `groups`.

    One group, unless `batch_groups` lets a micro-batch span several; then all samples of each.
    """

    groups: tuple[int, ...]
    shard: int
    samples: tuple[int, ...]

    @property
    def group(self) -> int:
        """The first group; with `shard` it identifies the micro-batch within its step."""
        return self.groups[0]

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(group, sample) of every row of the batch."""
        return tuple((group, sample) for group in self.groups for sample in self.samples)


@dataclass(frozen=True)
class GroupPlan:
    """Unit of commit: one prompt, one image size, one window, one policy version."""

    step: int
    group: int  # index within the step
    prompt: int  # index of the record
    record: PromptRecord
    height: int
    width: int
    window: tuple[int, int]  # (start, size)
    version: int


def initial_seeds(config: Config, group: GroupPlan) -> list[int]:
    """Seed of the initial latent of every sample of a group (see `noise_seed`)."""
    shared = config.sampling.shared_initial_noise
    return [noise_seed(config.train.seed, group.step, group.group, -1 if shared else sample, "train", -1)
            for sample in range(config.sampling.group_size)]


@dataclass(frozen=True)
class StepPlan:
    """A training step: its groups in plan order, which of them each update takes, and the micro-batches of both phases."""

    step: int
    version: int
    groups: tuple[GroupPlan, ...]
    updates: tuple[tuple[int, ...], ...]  # group indices per update, contiguous in plan order
    shards: tuple[MicroBatch, ...]  # sampling
    training: tuple[MicroBatch, ...]

    def train_micro_batches(self, update: int) -> list[MicroBatch]:
        """All training shards of an update, in plan order; none holds groups of two updates."""
        return [shard for shard in self.training if shard.group in self.updates[update]]

    def micro_batches_of(self, group: int) -> list[MicroBatch]:
        """Sampling shards that hold samples of a group, in plan order."""
        return [shard for shard in self.shards if group in shard.groups]

    def sources(self, shard: MicroBatch) -> list[MicroBatch]:
        """Sampling shards that hold the samples of a training shard, in plan order."""
        return [source for source in self.shards if set(shard.rows) & set(source.rows)]


@dataclass(frozen=True)
class RankWork:
    """What one rank does at one micro-step: a shard, and weight 0 where it only fills up the tail."""

    shard: MicroBatch
    weight: float


def micro_steps(shards: Sequence[MicroBatch], world_size: int) -> list[tuple[RankWork, ...]]:
    """Shard t * W + r to rank r at micro-step t; the tail is padded with a real shard at weight 0."""
    out = []
    for start in range(0, len(shards), world_size):
        row = [RankWork(shard, 1.0) for shard in shards[start : start + world_size]]
        row += [RankWork(shards[start], 0.0)] * (world_size - len(row))
        out.append(tuple(row))
    return out


def _shards_per_update(config: Config, micro_batch: int, batch_groups: int) -> int:
    """Training shards of an update whose groups are of one size and negative prompt; else there may be more."""
    groups = config.sampling.groups_per_step // config.train.updates_per_step
    return math.ceil(groups / batch_groups) * config.sampling.group_size // micro_batch


def _useful(shards: int, ranks: int) -> float:
    return shards / (math.ceil(shards / ranks) * ranks)


def useful_share(config: Config) -> float:
    """Share of an update's micro-steps, over all ranks, that is not padding (see `micro_steps`)."""
    shards = _shards_per_update(config, config.train_micro_batch, config.train_batch_groups)
    return _useful(shards, config.pools.learner.replicas)


def padding_note(config: Config, enough: float = 0.9) -> str | None:
    """What to say if less than `enough` of the learners' work is useful, with the next better micro-batch.

    That is the largest smaller one with `enough`, else the best of the smaller ones, else of the larger ones
    (which need more memory); if none is better, the next smaller number of ranks. Where micro-batches span
    groups it is the number of groups that changes.
    """
    share, ranks, t = useful_share(config), config.pools.learner.replicas, config.train
    if share >= enough:
        return None
    micro_batch, groups = config.train_micro_batch, config.train_batch_groups
    if groups > 1:
        key, own, now = "batch_groups", t.batch_groups, groups
        shards = {n: _shards_per_update(config, micro_batch, n) for n in range(1, groups)}
    else:
        key, own, now = "micro_batch", t.micro_batch, micro_batch
        shards = {n: _shards_per_update(config, n, 1) for n in divisors(config.sampling.group_size)}
    better = {n: value for n, count in shards.items() if (value := _useful(count, ranks)) > share}
    smaller = [n for n in better if n < now]
    best = max((n for n in smaller if better[n] >= enough), default=None)
    if best is None:
        best = max(smaller or better, key=better.__getitem__, default=None)
    if best is not None:
        section = "sampling" if own is None else "train"
        advice = f"{section}.{key}={best} makes it {better[best]:.0%}"
    else:
        count = _shards_per_update(config, micro_batch, groups)
        fitting = max(n for n in range(1, ranks) if _useful(count, n) >= enough)
        advice = (f"no other {key} is better; pools.learner.replicas={fitting} is busy for "
                  f"{_useful(count, fitting):.0%}")
    return (f"{share:.0%} of the work of {ranks} learner ranks is useful, the rest pads the last micro-step of "
            f"an update: {advice}")


def split_groups(
    groups: Sequence[int], group_size: int, micro_batch: int, batch_groups: int = 1
) -> tuple[MicroBatch, ...]:
    """Shards of `batch_groups` groups each (the last may hold fewer), `micro_batch` samples of every group."""
    return tuple(
        MicroBatch(tuple(groups[first : first + batch_groups]), shard, tuple(range(start, start + micro_batch)))
        for first in range(0, len(groups), batch_groups)
        for shard, start in enumerate(range(0, group_size, micro_batch))
    )


def batchable(kinds: Sequence[Hashable], size: int, starts: Collection[int] = ()) -> list[tuple[int, ...]]:
    """Blocks of at most `size` consecutive groups of one kind; no block goes on into a group of `starts`."""
    blocks: list[tuple[int, ...]] = []
    for group, kind in enumerate(kinds):
        fits = blocks and len(blocks[-1]) < size and kinds[blocks[-1][0]] == kind and group not in starts
        if fits:
            blocks[-1] += (group,)
        else:
            blocks.append((group,))
    return blocks


def window_of(seed: int, step: int, group: int, first: int, end: int, size: int) -> tuple[int, int]:
    """(start, size) of a group's window, uniform over the places inside [first, end)."""
    places = end - first - size + 1
    return first + int(_rng("window", seed, step, group).integers(places)), size


def training_negative(config: Config, record: PromptRecord) -> str | None:
    """The negative prompt that a training sample of a record gets; None if there is no CFG pass."""
    if config.sampling.guidance_scale <= 1:
        return None
    return config.data.negative_prompt if record.negative_prompt is None else record.negative_prompt


def plan_step(config: Config, records: Sequence[PromptRecord], step: int) -> StepPlan:
    """The plan of training step `step` (0-based); its groups are sampled with policy version `step`.

    The larger of `sampling.batch_groups` and `train.batch_groups` forms blocks of consecutive groups of one image size
    and one negative prompt, and a block has one window, drawn for its first group. Micro-batches never leave their
    block; those of training end with their update, and a block does so too, unless sampling's are the larger ones.
    """
    s, t, seed = config.sampling, config.train, config.train.seed
    prompts = [prompt_index(seed, step * s.groups_per_step + group, len(records)) for group in range(s.groups_per_step)]
    drawn = [records[prompt] for prompt in prompts]
    kinds = [(r.height or s.height, r.width or s.width, training_negative(config, r)) for r in drawn]
    size = s.groups_per_step // t.updates_per_step
    updates = tuple(tuple(range(u * size, (u + 1) * size)) for u in range(t.updates_per_step))
    together, trained_together = s.batch_groups, config.train_batch_groups
    blocks = batchable(kinds, max(together, trained_together),
                       () if together > trained_together else [update[0] for update in updates])
    windows = {group: window_of(seed, step, block[0], *config.window_range, config.window_size)
               for block in blocks for group in block}
    groups = tuple(
        GroupPlan(step=step, group=group, prompt=prompt, record=drawn[group], height=kinds[group][0],
                  width=kinds[group][1], window=windows[group], version=step)
        for group, prompt in enumerate(prompts))
    shards = tuple(shard for block in blocks for shard in split_groups(block, s.group_size, s.micro_batch, together))
    training = tuple(
        shard for update in updates for block in blocks for shard in split_groups(
            [group for group in block if group in update], s.group_size, config.train_micro_batch, trained_together))
    return StepPlan(step, step, groups, updates, shards, training)


@dataclass(frozen=True)
class EvalMicroBatch:
    """Images to make for evaluation: `items` are (prompt index, image index); the last `padding` ones are repeats that
    keep the shard's shape and are not counted."""

    shard: int
    items: tuple[tuple[int, int], ...]
    padding: int
    height: int
    width: int
    negative: str | None  # negative prompt of its records, where they carry one

    @property
    def counted(self) -> tuple[tuple[int, int], ...]:
        """`items` without the padding."""
        return self.items[: len(self.items) - self.padding]

    @property
    def prompts(self) -> list[int]:
        """Distinct prompt indices, in order of first use: the rows of the shard's conditioning."""
        return list(dict.fromkeys(prompt for prompt, _ in self.items))


def plan_evaluation(config: Config, records: Sequence[PromptRecord]) -> list[EvalMicroBatch]:
    """Evaluation shards: the first image of every prompt in file order, then the second ones, and so on. A shard has one
    image size and negative prompt; the last one of a kind is padded."""
    e, m = config.eval, config.eval.micro_batch or config.sampling.micro_batch
    kinds: dict[tuple[int, int, str | None], list[int]] = {}
    for prompt, record in enumerate(records[: e.num_prompts]):
        kind = (record.height or config.sampling.height, record.width or config.sampling.width, record.negative_prompt)
        kinds.setdefault(kind, []).append(prompt)
    shards: list[EvalMicroBatch] = []
    for (height, width, negative), prompts in kinds.items():
        items = [(prompt, image) for image in range(e.images_per_prompt) for prompt in prompts]
        for start in range(0, len(items), m):
            part = items[start : start + m]
            padding = m - len(part)
            shards.append(EvalMicroBatch(len(shards), tuple(part + [part[-1]] * padding), padding, height, width, negative))
    return shards
