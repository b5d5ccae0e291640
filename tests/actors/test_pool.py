"""Who does a task: two actors, of which one stands still until it is let go."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import ordered
import pytest
import ray

from actors.dispatch import Task
from actors.events import drive
from actors.pool import ActorPool
from actors.reward import RewardActor
from actors.scaling import kept_on
from actors.tracebacks import summary
from flowgrpo_ray.errors import FlowGrpoError

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Two:
    """A pool of two, and how its tasks ended."""

    def __init__(self, folder: str) -> None:
        self.done: list[tuple[int, int]] = []
        self.failed: list[Exception] = []
        remote = ray.remote(ordered.Halting).options(num_cpus=0.1, max_restarts=0)
        self.pool = ActorPool("worker", 2, lambda index, _: remote.remote(folder, index), max_deaths=4, start_timeout_s=120)
        self.drive(lambda: self.pool.all_ready)

    def drive(self, until: Callable[[], bool]) -> None:
        drive([self.pool], until, "the test")

    def submit(self, number: int, fails_on: tuple[int, ...] = ()) -> None:
        self.pool.submit(Task(f"work {number}", "work", (number, fails_on), (number,), 60, on_failed=self.failed.append,
                              on_done=lambda value, _: self.done.append(value)))

    def submit_behind(self, numbers: range, fails_on: dict[int, tuple[int, ...]] | None = None) -> None:
        """Submit all at once, as a queue that waits for the actors does."""
        pump, self.pool.pump = self.pool.pump, lambda: None
        for number in numbers:
            self.submit(number, (fails_on or {}).get(number, ()))
        self.pool.pump = pump
        self.pool.pump()

    def who(self) -> dict[int, int]:
        return dict(self.done)


@pytest.fixture
def two(tmp_path):
    made = Two(str(tmp_path))
    yield made
    made.pool.shutdown()


def test_a_long_queue_gives_each_actor_a_call_to_go_on_with(two):
    two.submit_behind(range(5))
    assert [len(m.running) for m in two.pool.members] == [2, 2]
    assert [task.what for task in two.pool._queue] == ["work 4"], "the last waits for whoever is free"


def test_the_last_calls_wait_for_an_actor_with_nothing_to_do(two, tmp_path):
    two.submit_behind(range(3))
    assert [len(m.running) for m in two.pool.members] == [1, 1]
    two.drive(lambda: len(two.done) == 2)
    assert two.who() == {1: 1, 2: 1}
    (tmp_path / "go").touch()
    two.drive(lambda: two.pool.idle)
    assert two.who() == {0: 0, 1: 1, 2: 1}


def test_a_call_that_waits_behind_a_slow_one_is_done_by_another(two, tmp_path):
    two.submit_behind(range(6))
    two.drive(lambda: len(two.done) == 5)
    assert two.who() == dict.fromkeys(range(1, 6), 1), "all but the one that the slow actor is at"
    assert not two.pool.idle
    slow = two.pool.members[0]
    (tmp_path / "go").touch()
    two.drive(lambda: two.pool.idle)
    two.drive(lambda: not slow.running)  # it does the other call too
    assert len(two.done) == 6 and two.who()[0] == 0, "which counts once"
    for number in range(6, 30):
        two.submit(number)
    two.drive(lambda: two.pool.idle)
    assert two.pool.members[0] is slow and two.pool.counts["deaths"] == 0, "and it goes on as before"
    assert sorted(two.who()) == list(range(30)) and len(two.done) == 30


@pytest.mark.parametrize("fails_on", [(0,), (1,), (0, 1)])
def test_a_call_fails_only_where_both_of_its_actors_fail(two, tmp_path, fails_on):
    """Call 2 waits behind the slow actor's first, so that both do it, the fast one first."""
    two.submit_behind(range(6), {2: fails_on})
    two.drive(lambda: not two.pool.members[1].running and not two.pool._queue)
    slow = two.pool.members[0]
    (tmp_path / "go").touch()
    two.drive(lambda: not slow.running)
    assert two.pool.idle
    if len(fails_on) == 2:
        assert [str(error) for error in two.failed] == ["2 failed on 0"] and 2 not in two.who()
    else:
        assert two.who()[2] == 1 - fails_on[0] and not two.failed


def test_a_failure_of_the_only_actor_at_a_call_counts(two, tmp_path):
    (tmp_path / "go").touch()
    two.submit(0, fails_on=(0,))
    two.drive(lambda: two.pool.idle)
    assert [str(error) for error in two.failed] == ["0 failed on 0"] and not two.done
    assert re.fullmatch(r"ValueError: 0 failed on 0 \(\S*/tests/support/ordered\.py, line \d+\)", summary(two.failed[0]))


@pytest.mark.parametrize(("where", "message"), [
    ("chained", "option where is 'chained':\nit is a chain"),
    ("init", r"reward own_rewards:Breaking: its constructor fails: KeyError: 'weights' \(\S*own_rewards.py, line \d+\)"),
    ("self_test", r"reward breaking: its self-test fails: ValueError: .* \(\S*own_rewards.py, line \d+\)"),
])
def test_of_an_actor_that_cannot_start_the_last_error_is_told_without_tracebacks(where, message):
    actor = ray.remote(RewardActor).options(num_cpus=0.1, max_restarts=0)
    pool = ActorPool("reward.mine", 1, lambda *_: actor.remote("mine", "own_rewards:Breaking", {"where": where}), max_deaths=0,
                     start_timeout_s=120)
    with pytest.raises(FlowGrpoError) as error:
        drive([pool], lambda: pool.all_ready, "the test")
    pool.shutdown()
    assert re.fullmatch(f"pool reward.mine: actor 0 could not start: {message}", str(error.value)), str(error.value)


def test_what_the_driver_keeps_on_a_node_is_known(two, tmp_path):
    """The big value lies where it was made; Ray sends small ones to the driver."""
    (tmp_path / "go").touch()
    big, small = (two.pool.members[1].handle.value.remote(size) for size in (300_000, 3))
    ray.wait([big, small], num_returns=2, timeout=60, fetch_local=False)
    refs, node, deadline = {"big": big, "small": small}, two.pool.members[1].node_id, time.monotonic() + 30
    while not kept_on({node}, refs) and time.monotonic() < deadline:  # Ray reports a place after the value is ready
        time.sleep(0.05)
    assert kept_on({node, "another"}, refs) == ["big"]
    assert kept_on({"another"}, refs) == [] and kept_on(set(), refs) == []
