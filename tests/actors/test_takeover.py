"""Two drivers of one run on one Ray, each of which takes the other for one of another machine."""

from __future__ import annotations

import itertools

import pytest
from runs import Watcher, run, small_config

from flowgrpo_ray.errors import CheckpointError, ResourceError
from flowgrpo_ray.run_dir import lock
from flowgrpo_ray.run_dir.metrics import read_metrics


def test_newcomer_that_cannot_start_costs_nothing_and_one_that_can_takes_over(ray_cluster, tmp_path, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(lock, "machine", lambda: f"machine {next(numbers)}")
    monkeypatch.setattr(lock, "BEAT_S", 1000)  # the older one shows no sign of life
    monkeypatch.setattr(lock, "OBSERVED_S", 0)
    config = small_config(tmp_path, "shared", overrides={"logging.flush_every_steps": 1})

    class Older(Watcher):
        newer = None

        def row(self, row):
            super().row(row)
            if row["step"] == 1:
                with pytest.raises(ResourceError):
                    run(small_config(tmp_path, "shared", overrides={"pools.rollout.num_cpus": 1000}))
            elif row["step"] == 2:
                self.newer = run(config)  # its actors are up beside the older one's

    older = Older()
    with pytest.raises(CheckpointError, match="has been taken over by"):
        run(config, older)
    assert [row["step"] for row in older.rows] == [1, 2], "it went on after the first newcomer, and not after the second"
    assert [row["step"] for row in older.newer.rows] == [1, 2, 3]
    assert older.newer.rows == read_metrics(older.newer.run_dir)
