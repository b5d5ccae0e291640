"""Scoring on real reward actors: dispatch, whole groups, monitors, and everything that can go wrong with a score."""

from __future__ import annotations

import logging
import re
from collections import Counter

import numpy as np
import own_rewards
import pytest
import ray
from scoring_bench import Bench, config_of, random_images

from actors.reward import RewardActor
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.rewards import RewardError

pytestmark = pytest.mark.timeout(180)


def own(function, **more):
    return {"python": f"own_rewards:{function}", **more}


def test_functions_classes_and_second_instances_score_side_by_side(ray_cluster):
    rewards = {"bright": own("brightness", options={"scale": 2.0}), "words": own("length"), "jpeg_compressibility": {},
               "size": {"type": "jpeg_compressibility", "weight": 0.0}}
    images = random_images(3)
    with Bench(config_of(rewards)) as bench:
        bench.submit(images, prompt="seven!!")
        scores = bench.finish(1)[0].scores
    assert list(scores) and scores.keys() == {"bright", "words", "words_wide", "jpeg_compressibility", "size"}
    assert np.allclose(scores["bright"], images.reshape(3, -1).mean(1) / 255 * 2)
    assert scores["words"].tolist() == [7, 7, 7] and scores["words_wide"].tolist() == [8, 8, 8]
    assert scores["size"].tobytes() == scores["jpeg_compressibility"].tobytes() and (scores["size"] < 0).all()


def test_a_reward_of_groups_gets_the_whole_group_whatever_the_order(ray_cluster):
    images = [random_images(2, seed) for seed in range(4)]
    with Bench(config_of({"place": own("rank_in_group")})) as bench:
        for group, shard in ((1, 1), (0, 1), (0, 0), (1, 0)):
            bench.submit(images[2 * group + shard], group=group, shard=shard, shards=2)
        a, b, c, d = bench.finish(4)
    for first, second, group in ((a, b, images[:2]), (c, d, images[2:])):
        expected = own_rewards.rank_in_group(np.concatenate(group), ["p"] * 4, [{}] * 4, [0] * 4)
        assert np.concatenate([first.scores["place"], second.scores["place"]]).tolist() == expected.tolist()


def test_monitors_leave_steps_out(ray_cluster):
    rewards = {"bright": own("brightness"), "now_and_then": own("length", weight=0.0, every_steps=3)}
    with Bench(config_of(rewards)) as bench:
        for step in range(1, 7):
            bench.submit(random_images(2), step=step)
        scores = bench.finish(6)
    assert ["now_and_then" in s.scores for s in scores] == [False, False, True, False, False, True]
    assert all("bright" in s.scores and s.valid.all() for s in scores)


def test_batch_invariant_rewards_are_filled_up_and_score_the_same(ray_cluster):
    images = [random_images(3, seed) for seed in range(12)]
    with Bench(config_of({"fillable": own("fillable")})) as bench:
        for number, batch in enumerate(images):
            bench.submit(batch, group=number)
        scores = bench.finish(12)
    for batch, s in zip(images, scores, strict=True):
        assert s.scores["fillable"].tolist() == own_rewards.brightness(batch, None, None).tolist()
    sizes = np.concatenate([s.scores["fillable_batch"] for s in scores])
    assert sizes.max() == 15 and sizes.min() >= 3, "up to 16 images, in whole shards of 3"


def test_images_of_other_sizes_fill_other_calls(ray_cluster):
    """And where a filled call fails, only the image at fault has no score."""
    images = [random_images(3, seed, victim=1 if seed == 7 else None) for seed in range(12)]
    images = [np.repeat(batch, 1 + number // 2 % 2, axis=1) for number, batch in enumerate(images)]
    with Bench(config_of({"fillable": own("fillable_faulty")})) as bench:
        for number, batch in enumerate(images):
            bench.submit(batch, group=number, height=batch.shape[1])
        results = bench.finish(12)
    for number, (batch, result) in enumerate(zip(images, results, strict=True)):
        expected = own_rewards.brightness(batch, None, None)
        assert np.flatnonzero(~result.valid).tolist() == ([1] if number == 7 else [])
        assert result.scores["fillable"][result.valid].tolist() == expected[result.valid].tolist()
    assert np.concatenate([r.scores["fillable_batch"][r.valid] for r in results]).max() > 3, "calls were filled"
    assert bench.scoring.counts["retries/fillable"] == 1, "and no call held images of two sizes"


def test_a_slow_replica_holds_up_only_the_call_that_it_is_at(ray_cluster, tmp_path):
    with Bench(config_of({"slow_on_one_actor": own("slow_on_one_actor", options={"folder": str(tmp_path)})}), 2) as bench:
        for number in range(8):
            bench.submit(random_images(2, number), group=number)
        scores = bench.finish(8)
    pids = [int(s.scores["slow_on_one_actor_pid"][0]) for s in scores]
    assert pids.count(int((tmp_path / "slow").read_text())) == 1
    for number, s in enumerate(scores):
        assert np.allclose(s.scores["slow_on_one_actor"], own_rewards.brightness(random_images(2, number), None, None))


FAULTS = ["raise", "hang", "die", "nan", "short", "empty", "words"]
# Deaths and time-outs of a pool: a batch, and its image alone; an actor's death is held against a task the second time. The
# answer before a death can be lost with it: then it is first held against that call.
REPLACED = {"die": ("deaths", {4, 5, 6}), "hang": ("timeouts", {2})}


def test_a_fault_masks_its_image_alone_and_is_counted(ray_cluster):
    """Every fault at once, a reward each: what one does must not touch the scores of the others."""
    rewards = {fault: own("faulty", options={"fault": fault}, timeout_s=3.0) for fault in FAULTS}
    images = [random_images(4, 0), random_images(4, 1, victim=2), random_images(4, 2)]
    with Bench(config_of(rewards)) as bench:
        for number, batch in enumerate(images):
            bench.submit(batch, group=number)
        results = bench.finish(3)
        counts, pools = bench.scoring.counts, {name: pool.counts for name, pool in bench.pools.items()}
    for number, (batch, result) in enumerate(zip(images, results, strict=True)):
        expected = own_rewards.brightness(batch, None, None)
        wrong = [2] if number == 1 else []
        assert np.flatnonzero(~result.valid).tolist() == wrong and not result.dropped.any()
        for fault in FAULTS:
            scores = result.scores[fault]
            assert np.flatnonzero(np.isnan(scores)).tolist() == wrong, f"{fault}: no score is no 0"
            assert np.array_equal(np.delete(scores, wrong), np.delete(expected, wrong)), fault
    for fault in FAULTS:
        assert counts[f"failures/{fault}"] == 1 and counts[f"retries/{fault}"] == 1, fault
        key, numbers = REPLACED.get(fault, ("deaths", {0}))
        assert pools[fault][key] in numbers and not +pools[fault] - Counter({key: 9}), fault


def test_a_group_without_a_score_is_masked_as_a_whole(ray_cluster):
    faults = ["raise", "hang", "die", "nan", "empty"]
    rewards = {fault: own("faulty_group", options={"fault": fault}, timeout_s=3.0, max_failure_rate=1.0) for fault in faults}
    with Bench(config_of(rewards)) as bench:
        for group in (0, 1):
            for shard in (0, 1):
                victim = 1 if (group, shard) == (1, 0) else None
                bench.submit(random_images(2, shard, victim), group=group, shard=shard, shards=2)
        results = bench.finish(4)
        counts = bench.scoring.counts
    assert [r.valid.any() for r in results] == [True, True, False, False] and results[0].valid.all()
    for fault in faults:
        assert counts[f"failures/{fault}"] == 4 and counts[f"retries/{fault}"] == 1
        assert np.isnan(np.concatenate([r.scores[fault] for r in results[2:]])).all()


def test_policies_fail_and_drop_group(ray_cluster):
    with Bench(config_of({"faulty": own("faulty", on_failure="fail")})) as bench:
        bench.submit(random_images(4, victim=1))
        message = r"failed on group 0 shard 0 image 1: ValueError: this image is beyond me.*is fail"
        with pytest.raises(FlowGrpoError, match=message):
            bench.finish(1)
    with Bench(config_of({"faulty": own("faulty", on_failure="drop_group")})) as bench:
        bench.submit(random_images(4, victim=1))
        assert bench.finish(1)[0].dropped.tolist() == [False, True, False, False]


def test_no_retries_and_more_retries(ray_cluster):
    for retries, counted in ((0, 0), (3, 3)):
        with Bench(config_of({"faulty": own("faulty", retries=retries, max_failure_rate=1.0)})) as bench:
            bench.submit(random_images(4, victim=1))
            result = bench.finish(1)[0]
            assert result.valid.sum() == (0 if retries == 0 else 3), "without retries nobody knows which image it was"
            assert bench.scoring.counts["retries/faulty"] == counted


def test_too_many_failures_stop_the_run(ray_cluster):
    with Bench(config_of({"faulty": own("faulty", max_failure_rate=0.2)})) as bench:
        bench.submit(random_images(4, victim=1))
        with pytest.raises(FlowGrpoError, match=r"no score for 1 of 4 images, more than rewards.faulty.max_failure_rate = 0.2"):
            bench.finish(1)


def test_a_budget_that_cannot_be_kept_stops_the_run_at_once(ray_cluster):
    with Bench(config_of({"faulty": own("faulty", retries=0, max_failure_rate=0.5)})) as bench:
        bench.scoring.expect(16)
        for number in range(4):
            bench.submit(random_images(4, number, victim=1 if number else None), group=number)
        with pytest.raises(FlowGrpoError, match=r"no score for 12 of 16 images, more than rewards\.faulty\.max"):
            bench.drive(lambda: len(bench.results) == 4)
        assert len(bench.results) < 4


def test_two_scores_that_would_have_one_name_stop_the_run(ray_cluster):
    with Bench(config_of({"other": own("ambiguous")})) as bench:
        bench.submit(random_images(2))
        with pytest.raises(FlowGrpoError, match="reward other gives two scores that would both be named 'other_a'"):
            bench.finish(1)


def test_a_failing_monitor_masks_nothing(ray_cluster):
    rewards = {"bright": own("brightness"), "faulty": own("faulty", weight=0.0)}
    with Bench(config_of(rewards)) as bench:
        bench.submit(random_images(4, victim=1))
        result = bench.finish(1)[0]
    assert result.valid.all() and np.isnan(result.scores["faulty"]).tolist() == [False, True, False, False]


def test_a_self_test_that_fails_stops_the_start(ray_cluster):
    with pytest.raises(FlowGrpoError, match="could not start: reward upside_down fails its self-test: .*from high to low"):
        Bench(config_of({"wrong": {"python": "upside_down:UpsideDown"}})).__enter__()
    Bench(config_of({"wrong": {"python": "upside_down:UpsideDown", "self_test": False}})).__enter__().__exit__()


def test_numeric_libraries_get_the_threads_that_the_model_section_says(ray_cluster):
    """Bits depend on it, so the CPUs of a pool must not."""
    with Bench(config_of({"threads": own("threads")}, **{"model.cpu_threads": 2})) as bench:
        bench.submit(random_images(1))
        scores = bench.finish(1)[0].scores
    assert scores["threads"].tolist() == scores["threads_omp"].tolist() == [2.0]


def test_calls_are_filled_up_to_the_default_of_the_option(ray_cluster):
    with Bench(config_of({"limited": {"python": "own_rewards:Limited"}})) as bench:
        for number in range(9):
            bench.submit(random_images(1, number), group=number)
        sizes = {size for s in bench.finish(9) for size in s.scores["limited_together"]}
    assert sizes == {1.0, 2.0}


def test_an_actor_that_does_not_use_its_gpu_does_not_start(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    given = r"the actor of reward mine was given a GPU \(pools.reward.mine.num_gpus\), and "
    with pytest.raises(RewardError, match=given + "torch sees none: is this a CPU build of torch"):
        RewardActor("mine", "own_rewards:threads", {}, on_gpu=True)
    with pytest.raises(RewardError, match=given + "the process sees none"):
        RewardActor("mine", "ocr", {"mode": "recognition"}, on_gpu=True)
    with pytest.raises(RewardError, match=given + "option device is cpu"):
        RewardActor("mine", "ocr", {"mode": "recognition", "device": "cpu"}, on_gpu=True)
    with pytest.raises(RewardError, match="reward ocr: option device is gpu, and the process sees none"):
        RewardActor("mine", "ocr", {"mode": "recognition", "device": "gpu"}, on_gpu=True)
    RewardActor("mine", "ocr", {"mode": "recognition"}, self_test=False)


def test_two_scores_of_one_name_stop_the_run(ray_cluster):
    for weight in (1.0, 0.0):
        rewards = {"jpeg_compressibility": {}, "jpeg": own("jpeg", weight=weight)}
        with Bench(config_of(rewards)) as bench:
            bench.submit(random_images(2))
            with pytest.raises(FlowGrpoError, match="rewards jpeg_compressibility and jpeg both give a score named 'jpeg_"):
                bench.finish(1)


def test_batch_invariance_that_is_only_said_stops_the_start(ray_cluster):
    with pytest.raises(FlowGrpoError, match="declared batch_invariant, and its scores depend on the batch"):
        Bench(config_of({"lies": own("depends_on_batch")})).__enter__()
    with Bench(config_of({"fillable": own("fillable", self_test=False)})) as bench:  # not checked, so not made use of
        for number in range(4):
            bench.submit(random_images(3, number), group=number)
        assert {size for s in bench.finish(4) for size in s.scores["fillable_batch"]} == {3.0}


def test_an_error_that_cannot_travel_tells_its_reason(ray_cluster, caplog):
    with Bench(config_of({"secret": own("keeps_a_secret", max_failure_rate=1.0)})) as bench:
        bench.submit(random_images(2))
        assert not bench.finish(1)[0].valid.any()
    assert "Secret: the reason" in caplog.text


def test_a_bug_is_told_once_a_step_with_its_place_and_counted(ray_cluster, caplog):
    """Not once for each of hundreds of images."""
    with caplog.at_level(logging.WARNING), Bench(config_of({
            "mine": own("faulty_everywhere", max_failure_rate=1.0, self_test=False)})) as bench:
        for group in range(3):
            bench.submit(random_images(4), group=group)
        bench.finish(3)
    first, last = [record.getMessage() for record in caplog.records if "mine" in record.getMessage()]
    assert re.search(r"IndexError: lost \(\S*own_rewards.py, line \d+\); scoring its images one by one$", first)
    assert re.search(r"reward mine failed 14 more times in this way: IndexError: lost \(\S*own_rewards.py", last)


def test_what_a_reward_notes_is_logged_once(ray_cluster, caplog):
    with Bench(config_of({"plain": own("Noting")}), 2) as bench:
        for number in range(4):
            bench.submit(random_images(2, number), group=number)
        bench.finish(4)
    assert [record.message for record in caplog.records if "colours" in record.message] == [
        "reward plain: it does without colours"]


def test_a_shard_without_rewards_is_scored_at_once(ray_cluster):
    with Bench(config_of({"place": own("rank_in_group")})) as bench:
        assert bench.scoring.of_images == []
        bench.scoring.submit("shard", (0, 0, 0), None, [PromptRecord("p")] * 2, lambda s: bench.results.update({0: s}),
                             rewards=[])
        assert bench.results[0].valid.all() and not bench.results[0].scores


def test_a_scope_that_the_driver_does_not_know_is_refused(ray_cluster):
    handle = ray.remote(RewardActor).remote("place", "own_rewards:rank_in_group", {}, True, 0, "sample")
    with pytest.raises(ray.exceptions.RayActorError, match="scored per group, and the run takes it for one"):
        ray.get(handle.ready.remote(), timeout=60)
