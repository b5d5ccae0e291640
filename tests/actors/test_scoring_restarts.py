"""A reward actor that cannot start again: what the policy of its reward says happens, and nothing else."""

from __future__ import annotations

import logging

import numpy as np
import own_rewards
import pytest
from scoring_bench import Bench, config_of, random_images

from flowgrpo_ray.errors import FlowGrpoError


def backed(folder, **more):
    return {"backed": {"python": "starting_again:Backed", "options": {"folder": str(folder)}, **more}}


def test_its_images_are_masked_until_it_starts_again(ray_cluster, tmp_path, caplog):
    with caplog.at_level(logging.WARNING), Bench(config_of(backed(tmp_path))) as bench:
        bench.submit(random_images(3, 0))
        assert bench.finish(1)[0].valid.all()
        bench.submit(random_images(3, 1, victim=1), shard=1)
        bench.drive(lambda: len(bench.results) == 2)
        pool = bench.pools["backed"]
        lost = bench.results[1, 0, 1]
        assert not lost.valid.any() and np.isnan(lost.scores["backed"]).all() and not lost.dropped.any()
        assert bench.scoring.counts["failures/backed"] == 3 and pool.counts["failed_starts"] >= 2
        assert pool.counts["deaths"] == 1 and "cannot start" in pool.activity()
        assert "no actor of the pool could be started again" in caplog.text and "the backend does not answer" in caplog.text
        with pytest.raises(FlowGrpoError, match="no score for 3 of 3 images"):
            bench.scoring.check_budget()
        (tmp_path / "gone").unlink()
        bench.submit(random_images(3, 2), shard=2)
        back = bench.finish(3)[2]
        assert back.valid.all()
        assert np.allclose(back.scores["backed"], own_rewards.brightness(random_images(3, 2), None, None))
        assert pool.members[0].failed_starts == 0 and pool.activity() == ["idle"]


def test_others_of_its_pool_go_on(ray_cluster, tmp_path):
    with Bench(config_of(backed(tmp_path)), replicas=2) as bench:
        for number in range(6):
            bench.submit(random_images(3, number, victim=1 if number == 2 else None), shard=number)
        results = bench.finish(6)
        pool = bench.pools["backed"]
        bench.drive(lambda: pool.counts["failed_starts"] >= 2)
        assert pool.counts["deaths"] == 1 and "idle" in pool.activity()
    assert all(r.valid.all() for r in results) and not bench.scoring.counts


def test_the_run_stops_where_the_policy_says_so(ray_cluster, tmp_path):
    with Bench(config_of(backed(tmp_path, on_failure="fail"))) as bench:
        bench.submit(random_images(3, victim=1))
        with pytest.raises(FlowGrpoError, match="could be started again: .*the backend does not answer.*on_failure is fail"):
            bench.finish(1)


def test_the_first_start_stops_the_run_whatever_the_policy(ray_cluster, tmp_path):
    (tmp_path / "gone").touch()
    with pytest.raises(FlowGrpoError, match="reward.backed: actor 0 could not start: the backend does not answer"):
        Bench(config_of(backed(tmp_path))).__enter__()
