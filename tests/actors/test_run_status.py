"""The state of a run, as its driver sees it."""

from __future__ import annotations

import time

from runs import Watcher, run, small_config

from actors.status import Activity, run_status
from actors.step import StepBoard
from flowgrpo_ray import storage
from flowgrpo_ray.data.plan import plan_step
from flowgrpo_ray.preflight import check
from flowgrpo_ray.run_dir.checkpoint import latest
from flowgrpo_ray.views.status import RunStatus


class Statuses(Watcher):
    """Takes the status whenever it is told what the actors do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[RunStatus] = []

    def activity(self, doing) -> None:
        self.seen.append(run_status(self.controller))


def test_waits_are_counted_by_reason_and_phases_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity = Activity()
    with activity.doing("syncing"):
        for seconds in (0.5, 0.5, 9.0):
            activity.wait("weight sync", "sync")
            now[0] += seconds
        assert activity.waiting_for == "weight sync"
    assert activity.waiting_s == {"sync": 10.0} and activity.phase == "starting" and activity.waiting_for == ""
    now[0] += 50.0  # the driver is at work of its own
    activity.wait("step 2", "rollout")
    assert sum(activity.waiting_s.values()) == 10.0
    activity.recorded({"step": 2.0, "time_step": 30.0, "images_per_s": 3.0})
    now[0] += 10.0
    assert activity.seconds_left(2) == 50.0 and activity.images_per_s == 3.0


def test_groups_are_counted_by_the_stage_that_they_are_in(tmp_path):
    config = small_config(tmp_path, "queue")
    plan = plan_step(config, check(config).train, 0)
    board = StepBoard(config, plan, 1)

    def queue() -> list[int]:
        return list(board.queue().values())

    assert list(board.queue()) == ["encoding", "sampling", "scoring", "learning"] and queue() == [4, 0, 0, 0]
    for group in range(3):
        board.encoded(group, f"conditioning {group}")
    assert queue() == [1, 3, 0, 0]
    shards = plan.micro_batches_of(0) + plan.micro_batches_of(1)
    for shard in shards[:-1]:
        board.sampled(shard, "trajectory", 7)
    assert board.held_bytes == 7 * (len(shards) - 1)
    assert queue() == [1, 2, 1, 0], "the last shard of group 1 is not sampled"
    board.complete[0] = "scores"
    assert queue() == [1, 2, 0, 1]
    for _ in range(len(plan.train_micro_batches(0)) // 2):
        assert queue() == [1, 2, 0, 1]
        board.trained()
    assert queue() == [1, 2, 0, 0], "the learner has answered for all micro-batches of group 0"


def test_a_run_tells_what_it_is_at(ray_cluster, tmp_path):
    config = small_config(tmp_path, "told", steps=2, overrides={
        "eval.at_end": True, "checkpoint.every_steps": 1, "pools.rollout.replicas": 2})
    watcher = Statuses()
    run_dir = run(config, watcher).run_dir
    phases = list(dict.fromkeys(status.phase for status in watcher.seen))
    assert phases[:2] == ["starting", "syncing"]
    assert {"sampling", "learning", "evaluating", "checkpointing"} <= set(phases)
    first, last = watcher.seen[0], watcher.seen[-1]
    assert (first.step, first.steps, first.version, first.checkpoint_step) == (0, 2, 0, None)
    assert first.seconds_left is None and first.pools["rollout"].starting == 2
    assert (last.run, last.run_dir, last.step, last.version) == ("told", run_dir, 2, 2)
    assert last.images_per_s > 0
    assert {"actors", "sync", "rollout", "checkpoint", "evaluation"} <= last.waiting_s.keys()
    second = [status for status in watcher.seen if status.step == 1 and status.phase == "learning"]
    assert second and second[0].checkpoint_step == 1 and 0 < second[0].seconds_left
    files = latest(run_dir).files
    assert second[0].checkpoint_bytes == sum(file.size for file in files)
    assert last.pools.keys() == {"rollout", "reward.jpeg_compressibility", "learner"}
    assert last.pools["rollout"].ready == 2 and sum(last.pools["learner"].nodes.values()) == 1
    assert RunStatus.from_json(last.to_json()) == last

    resumed = Statuses()
    run(config.model_copy(update={"run": config.run.model_copy(update={"steps": 3})}), resumed)
    start = resumed.seen[0]
    assert (start.step, start.version, start.checkpoint_step) == (2, 2, 2)
    assert start.checkpoint_time == storage.modified(f"{run_dir}/checkpoints/step_2/state.json")
    assert start.checkpoint_bytes > 0
