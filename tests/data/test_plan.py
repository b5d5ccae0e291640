"""The plan is a pure function of (config, step): who works, and in which order, cannot change it."""

import hashlib
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo_ray.config.load import divisors, from_tree, load
from flowgrpo_ray.data.plan import (
    micro_steps,
    noise_seed,
    padding_note,
    plan_evaluation,
    plan_step,
    prompt_index,
    split_groups,
    useful_share,
    window_of,
)
from flowgrpo_ray.data.prompts import PromptRecord

KNOWN = 4423153495418491094
RECORDS = [PromptRecord(f"prompt {i}", line=i + 1) for i in range(7)]


def configuration(seed=42, **sampling):
    sampling = {"group_size": 6, "groups_per_step": 4, "micro_batch": 3, "num_steps": 10, **sampling}
    return from_tree({
        "rewards": {"ocr": {}}, "sampling": sampling, "train": {"seed": seed, "updates_per_step": 2},
        "eval": {"micro_batch": 4, "images_per_prompt": 2}})


def test_the_same_step_is_planned_alike_whatever_was_planned_or_drawn_before():
    config = configuration(window={"size": 2, "range": [0, 5]})
    alone = plan_step(config, RECORDS, 5)
    np.random.seed(1)
    random.seed(1)
    torch.manual_seed(1)
    for step in (9, 0, 5, 3):
        plan_step(config, RECORDS, step)
        plan_step(configuration(seed=1), RECORDS, step)
    assert plan_step(configuration(window={"size": 2, "range": [0, 5]}), list(RECORDS), 5) == alone


@pytest.mark.parametrize(
    "pools", [{"rollout": {"replicas": 7}, "learner": {"replicas": 3}}, {"placement": "colocated"}])
def test_resources_do_not_enter_the_plan(pools):
    config = configuration()
    other = from_tree({**config.model_dump(mode="json"), "pools": pools})
    assert plan_step(config, RECORDS, 2) == plan_step(other, RECORDS, 2)


def test_a_known_noise_seed():
    """Frozen: another value here would change the result of every configuration."""
    assert noise_seed(42, 3, 5, 7, "train", -1) == KNOWN
    digest = hashlib.sha256(b"42/3/5/7/train/-1").digest()
    assert KNOWN == int.from_bytes(digest[:8], "big") % 2**63


@settings(deadline=None)
@given(st.tuples(*[st.integers(0, 10**6)] * 4), st.sampled_from(["train", "eval"]), st.integers(-1, 50))
def test_noise_seeds_have_63_bits(key, stream, step_index):
    seed = noise_seed(*key, stream, step_index)
    assert 0 <= seed < 2**63
    torch.Generator().manual_seed(seed)


def test_noise_seeds_of_different_keys_differ():
    keys = [(seed, step, group, sample, stream, index)
            for seed in (1, 11) for step in (1, 11) for group in (1, 11) for sample in (1, 11)
            for stream in ("train", "eval") for index in (-1, 1, 11)]
    assert len({noise_seed(*key) for key in keys}) == len(keys)


def test_prompts_are_drawn_without_replacement_and_shuffled_anew_each_epoch():
    orders = [[prompt_index(42, epoch * 50 + place, 50) for place in range(50)] for epoch in range(6)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    assert orders[0] != list(range(50))
    assert [prompt_index(43, place, 50) for place in range(50)] != orders[0]


def test_steps_walk_through_the_prompts_without_gaps():
    """4 groups a step, 7 prompts: epochs end in the middle of steps."""
    config = configuration()
    drawn = [group.prompt for step in range(7) for group in plan_step(config, RECORDS, step).groups]
    assert drawn == [prompt_index(42, position, 7) for position in range(28)]
    assert Counter(drawn) == dict.fromkeys(range(7), 4)
    assert all(group.record is RECORDS[group.prompt] for group in plan_step(config, RECORDS, 3).groups)


@settings(deadline=None)
@given(first=st.integers(0, 5), span=st.integers(1, 8), size=st.integers(1, 8), step=st.integers(0, 1000))
def test_windows_lie_inside_the_range(first, span, size, step):
    size = min(size, span)
    start, width = window_of(42, step, 3, first, first + span, size)
    assert width == size and first <= start and start + size <= first + span


def test_windows_vary_over_groups_and_steps_and_reach_every_place():
    """One frozen window for a run is a known mistake of distributed code that seeds its generator in every call."""
    config = configuration(groups_per_step=12, window={"size": 2, "range": [1, 6]})
    windows = [[group.window for group in plan_step(config, RECORDS, step).groups] for step in range(20)]
    assert Counter(window for row in windows for window in row).keys() == {(start, 2) for start in (1, 2, 3, 4)}
    assert all(len(set(row)) > 1 for row in windows)
    assert len(set(map(tuple, windows))) == 20
    counts = Counter(window for row in windows for window in row).values()
    assert min(counts) > 240 / 4 / 2  # about uniform


def test_the_default_window_is_all_steps_but_the_last():
    assert {group.window for group in plan_step(configuration(), RECORDS, 0).groups} == {(0, 9)}


@settings(deadline=None)
@given(st.integers(2, 48).flatmap(lambda k: st.tuples(st.just(k), st.sampled_from(divisors(k)))))
def test_shards_are_a_partition_of_the_group(sizes):
    group_size, micro_batch = sizes
    shards = split_groups([3], group_size, micro_batch)
    assert [sample for shard in shards for sample in shard.samples] == list(range(group_size))
    assert {len(shard.samples) for shard in shards} == {micro_batch}
    assert [(shard.group, shard.shard) for shard in shards] == [(3, i) for i in range(group_size // micro_batch)]


def test_updates_are_contiguous_and_cover_the_step():
    plan = plan_step(configuration(), RECORDS, 4)
    assert plan.updates == ((0, 1), (2, 3))
    assert plan.version == plan.step == 4 and {group.version for group in plan.groups} == {4}
    assert [(shard.group, shard.shard) for shard in plan.train_micro_batches(1)] == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_training_shards_may_have_another_size():
    config = from_tree({
        "rewards": {"ocr": {}}, "sampling": {"group_size": 6, "groups_per_step": 2, "micro_batch": 3},
        "train": {"micro_batch": 2, "ratio_tolerance": 1e-4}})
    plan = plan_step(config, RECORDS, 0)
    trained = [shard for shard in plan.train_micro_batches(0) if shard.groups == (0,)]
    assert [shard.samples for shard in plan.micro_batches_of(0)] == [(0, 1, 2), (3, 4, 5)]
    assert [shard.samples for shard in trained] == [(0, 1), (2, 3), (4, 5)]
    assert [[source.shard for source in plan.sources(shard)] for shard in trained] == [[0], [0, 1], [1]]


def batched(sampling: int, training: int | None = None, updates: int = 2, **changes):
    """12 groups of 6, micro-batches of whole groups."""
    return from_tree({
        "rewards": {"ocr": {}},
        "sampling": {"group_size": 6, "groups_per_step": 12, "micro_batch": 6, "num_steps": 10, "batch_groups": sampling,
                     "window": {"size": 2, "range": [0, 9]}, **changes},
        "train": {"updates_per_step": updates, "batch_groups": training, "ratio_tolerance": 1e-4}})


def test_without_batches_of_groups_every_window_is_its_own():
    plan = plan_step(batched(1), RECORDS, 3)
    assert [shard.groups for shard in plan.shards] == [(group,) for group in range(12)]
    assert [group.window for group in plan.groups] == [window_of(42, 3, group, 0, 9, 2) for group in range(12)]


def test_batches_of_groups_share_the_window_of_their_first_and_end_with_their_update():
    plan = plan_step(batched(4), RECORDS, 0)
    batches = [(0, 1, 2, 3), (4, 5), (6, 7, 8, 9), (10, 11)]
    assert [shard.groups for shard in plan.shards] == batches
    assert plan.training == plan.shards, "sampling and training have the same shapes"
    assert plan.train_micro_batches(1) == list(plan.shards[2:])
    for batch in batches:
        assert {plan.groups[group].window for group in batch} == {window_of(42, 0, batch[0], 0, 9, 2)}
    assert plan.shards[1].rows == tuple((group, sample) for group in (4, 5) for sample in range(6))


def test_larger_batches_of_sampling_span_updates_and_smaller_ones_lie_in_a_training_batch():
    plan = plan_step(batched(4, 1, updates=4), RECORDS, 0)
    assert [shard.groups for shard in plan.shards] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert [shard.groups for shard in plan.train_micro_batches(1)] == [(3,), (4,), (5,)]
    assert [[s.groups for s in plan.sources(shard)] for shard in plan.train_micro_batches(1)] == [
        [(0, 1, 2, 3)], [(4, 5, 6, 7)], [(4, 5, 6, 7)]]
    plan = plan_step(batched(1, 3), RECORDS, 0)
    assert [shard.groups for shard in plan.shards] == [(group,) for group in range(12)]
    assert [shard.groups for shard in plan.train_micro_batches(1)] == [(6, 7, 8), (9, 10, 11)]
    assert [source.groups for source in plan.sources(plan.train_micro_batches(1)[0])] == [(6,), (7,), (8,)]


@settings(deadline=None)
@given(sampling=st.integers(1, 13), training=st.integers(1, 13), updates=st.sampled_from(divisors(12)),
       step=st.integers(0, 50), guidance=st.sampled_from([1.0, 4.5]))
def test_batches_of_groups_are_of_one_kind_and_cover_the_step_once(sampling, training, updates, step, guidance):
    records = [PromptRecord(str(i), line=i + 1, height=64 if i % 3 == 0 else None, negative_prompt="x" if i % 4 == 0 else None)
               for i in range(11)]
    plan = plan_step(batched(sampling, training, updates, guidance_scale=guidance, height=32, width=32), records, step)
    every = [(group, sample) for group in range(12) for sample in range(6)]
    assert [row for shard in plan.shards for row in shard.rows] == every
    assert [row for shard in plan.training for row in shard.rows] == every
    for shards, size in ((plan.shards, sampling), (plan.training, training)):
        for shard in shards:
            groups = [plan.groups[group] for group in shard.groups]
            assert len(groups) <= size
            assert len({(g.height, g.width, g.window) for g in groups}) == 1
            assert guidance == 1.0 or len({g.record.negative_prompt for g in groups}) == 1
    for number, update in enumerate(plan.updates):
        assert [group for shard in plan.train_micro_batches(number) for group in shard.groups] == list(update)
    if sampling == training:
        assert plan.shards == plan.training


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_micro_steps_give_every_shard_once_and_every_rank_the_same_number(world_size):
    shards = list(split_groups([0], 7, 1))
    rows = micro_steps(shards, world_size)
    assert len(rows) == -(-7 // world_size) and {len(row) for row in rows} == {world_size}
    for t, row in enumerate(rows):
        for rank, work in enumerate(row):
            place = t * world_size + rank
            assert (work.shard, work.weight) == (shards[place], 1.0) if place < 7 else work.weight == 0.0
            assert work.shard in shards
    assert [work.shard for row in rows for work in row if work.weight] == shards


def test_records_choose_their_own_size():
    records = [PromptRecord("a", height=64, width=128), PromptRecord("b", width=64)]
    config = configuration(height=32, width=32, groups_per_step=2)
    sizes = {group.record.prompt: (group.height, group.width) for group in plan_step(config, records, 0).groups}
    assert sizes == {"a": (64, 128), "b": (32, 64)}


def test_evaluation_covers_each_image_once_in_shards_of_one_shape():
    records = [PromptRecord(str(i), height=64 if i == 2 else None) for i in range(5)]
    shards = plan_evaluation(configuration(height=32, width=32), records)
    real = [(shard.items[: len(shard.items) - shard.padding], shard.height) for shard in shards]
    assert sorted(item for items, _ in real for item in items) == [(p, i) for p in range(5) for i in range(2)]
    assert {len(shard.items) for shard in shards} == {4}
    assert [shard.shard for shard in shards] == list(range(len(shards)))
    assert all((height == 64) == (prompt == 2) for items, height in real for prompt, _ in items)
    padded = [shard for shard in shards if shard.padding]
    assert [shard.padding for shard in padded] == [2]
    assert set(padded[0].items[-2:]) <= set(padded[0].items[:-2])
    assert shards[0].prompts == [0, 1, 3, 4], "the first images of all prompts of a kind come first"


def test_evaluation_of_the_first_prompts_only():
    config = configuration()
    config.eval.num_prompts = 3
    assert {prompt for shard in plan_evaluation(config, RECORDS) for prompt, _ in shard.items} == {0, 1, 2}


SD35 = str(Path(__file__).parents[2] / "configs" / "sd35_medium_ocr.yaml")


@pytest.mark.parametrize(("ranks", "overrides", "share", "advice"), [
    (8, {}, 1.0, None),
    (24, {}, 1.0, None),
    (16, {}, 0.9, None),
    (32, {}, 0.75, "sampling.micro_batch=6 makes it 100%"),
    (64, {}, 0.5625, "sampling.micro_batch=3 makes it 100%"),
    (32, {"train.micro_batch": 8}, 0.75, "train.micro_batch=6 makes it 100%"),
    (128, {"sampling.micro_batch": 2}, 0.75, "sampling.micro_batch=1 makes it 90%"),
    (1000, {}, 0.072, "sampling.micro_batch=1 makes it 58%"),
    (600, {"sampling.micro_batch": 1}, 0.96, None),
    (8, {"sampling.micro_batch": 24, "sampling.batch_groups": 2}, 0.75, "sampling.batch_groups=1 makes it 100%"),
    (700, {"sampling.micro_batch": 1}, 576 / 700, "no other micro_batch is better; pools.learner.replicas=640 is busy for 90%"),
])
def test_padding_at_many_ranks_is_said_with_the_next_better_micro_batch(ranks, overrides, share, advice):
    config = load(SD35, {"pools.learner.replicas": ranks, **overrides})
    assert useful_share(config) == pytest.approx(share)
    note = padding_note(config)
    assert (note is None) == (advice is None)
    if note:
        assert note.startswith(f"{share:.0%} of the work of {ranks} learner ranks is useful") and advice in note


@pytest.mark.parametrize("ranks", [1, 3, 8, 32, 64])
@pytest.mark.parametrize("overrides", [{}, {"sampling.micro_batch": 24, "sampling.batch_groups": 5}])
def test_the_useful_share_is_that_of_the_plan(ranks, overrides):
    config = load(SD35, {"pools.learner.replicas": ranks, **overrides})
    plan = plan_step(config, [PromptRecord("a")], 0)
    rows = [row for u in range(len(plan.updates)) for row in micro_steps(plan.train_micro_batches(u), ranks)]
    work = [part for row in rows for part in row]
    assert sum(part.weight for part in work) / len(work) == pytest.approx(useful_share(config))
