"""Answers and deadlines: what is there in time is taken, what comes after its call was given up is dropped and counted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import ordered
import pytest
import ray
from runs import Watcher, assert_same_bits, run, small_config

from actors.dispatch import Task
from actors.events import drive
from actors.pool import ActorPool
from flowgrpo_ray.errors import FlowGrpoError

pytestmark = pytest.mark.usefixtures("ray_cluster")

REWARD = "jpeg_compressibility"


class Bench:
    """One pool of one worker, and how its task ended."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: list[Exception] = []
        self.pool = ActorPool(
            "worker", 1, lambda *_: ray.remote(ordered.Worker).options(num_cpus=0.1, max_restarts=0).remote(),
            start_timeout_s=120, max_deaths=4)
        self.drive(lambda: self.pool.all_ready)

    def drive(self, until: Callable[[], bool]) -> None:
        drive([self.pool], until, "the test")

    def submit(self, seconds: float, timeout_s: float) -> ray.ObjectRef:
        self.pool.submit(Task("work", "work", (seconds, "answer"), (0,), timeout_s, on_failed=self.failed.append,
                              on_done=lambda value, _: self.done.append(value)))
        return self.pool.waiting_for()[0]


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.pool.shutdown()


@pytest.fixture
def slow_kill(monkeypatch):
    """slow_kill(answered): actors are killed once `answered()` has waited for their answer: the kill lost the race."""
    kill = ray.kill

    def set_up(answered: Callable[[], None]) -> None:
        def late(actor, **options):
            answered()
            kill(actor, **options)
        monkeypatch.setattr(ray, "kill", late)

    return set_up


def test_an_answer_that_is_there_when_the_deadline_is_noticed_is_taken(bench):
    """The driver was late to look, not the actor to answer."""
    pid = bench.pool.members[0].pid
    ref = bench.submit(0.5, timeout_s=0.4)
    assert ray.wait([ref], timeout=60)[0]
    time.sleep(0.5)
    bench.pool.settle(set())  # what was ready had been looked up before the answer came
    assert bench.done == ["answer"] and not bench.failed
    assert bench.pool.counts["timeouts"] == 0 and bench.pool.count_late_answers() == 0
    bench.submit(0, timeout_s=60)
    bench.drive(lambda: len(bench.done) == 2)
    assert bench.pool.members[0].pid == pid, "its actor was not replaced"


def test_an_answer_after_its_call_was_given_up_is_dropped_and_counted_once(bench, slow_kill):
    ref = bench.submit(1.5, timeout_s=0.3)
    slow_kill(lambda: ray.wait([ref], timeout=60))
    bench.drive(lambda: bool(bench.failed or bench.done))
    assert not bench.done and isinstance(bench.failed[0], TimeoutError)
    assert [bench.pool.count_late_answers() for _ in range(2)] == [1, 1]
    assert bench.pool.counts["timeouts"] == 1


def test_calls_that_hang_are_for_their_owner_to_count(bench):
    bench.pool._max_deaths = 1
    for number in range(1, 4):
        bench.submit(3600, timeout_s=0.05)
        bench.drive(lambda number=number: len(bench.failed) == number)
    assert bench.pool.counts["timeouts"] == 3 and bench.pool.counts["deaths"] == 0


def test_deaths_of_earlier_steps_are_forgiven(bench):
    def die() -> None:
        before = bench.pool.counts["deaths"]
        bench.submit(3600, timeout_s=600)
        os.kill(bench.pool.members[0].pid, signal.SIGKILL)
        bench.drive(lambda: bench.pool.counts["deaths"] > before and bench.pool.all_ready)

    bench.pool._max_deaths = 1
    die()
    bench.pool.forgive_deaths()
    die()
    with pytest.raises(FlowGrpoError, match=r"pool worker: more than 1 actor died or were taken out within one step"):
        die()


def test_a_call_that_never_answers_is_no_late_answer(bench):
    ref = bench.submit(3600, timeout_s=0.3)
    bench.drive(lambda: bool(bench.failed or bench.done))
    assert isinstance(bench.failed[0], TimeoutError)
    ray.wait([ref], timeout=60)
    assert bench.pool.count_late_answers() == 0 and not bench.pool._late, "its ref was let go"


@pytest.mark.slow
def test_late_scores_and_samples_change_nothing_but_the_count(tmp_path, slow_kill):
    sound = run(small_config(tmp_path, "sound", steps=1))
    env = {"EVENTS": str(tmp_path)}
    watcher = Watcher()

    def answered() -> None:
        """Lets the calls go that were given up, and waits for what they say."""
        for pool in watcher.controller.pools if watcher.controller is not None else []:
            if pool._late:
                (tmp_path / f"{pool.name.split('.')[0]}-may-answer").touch()
                ray.wait(pool._late, num_returns=len(pool._late), timeout=60)

    slow_kill(answered)
    overrides = {f"rewards.{REWARD}.timeout_s": 8.0, "pools.rollout.timeout_s": 15.0, "pools.rollout.env": env,
                 f"pools.reward.{REWARD}.env": env}
    finished = run(small_config(tmp_path, "late", steps=1, overrides=overrides), watcher, reward_class=ordered.LateReward,
                   rollout_class=ordered.LateRollout)
    row = finished.rows[-1]
    assert row["late_answers_dropped"] == row["timeouts/rollout"] + row[f"timeouts/reward.{REWARD}"] == 2
    assert row[f"scoring_retries/{REWARD}"] == 1 and row[f"scoring_failures/{REWARD}"] == row["masked_samples"] == 0
    assert_same_bits(sound.adapter, finished.adapter)
