"""An actor that fails fast: others do its calls, and it is replaced. Nearly all without Ray."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection

import numpy as np
import pytest
from fake_ray import Handle, install
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_bench import Bench, config_of, random_images

from actors.dispatch import Task
from actors.pool import ActorPool
from actors.process import Process
from actors.sampling import MAX_ATTEMPTS, Sampling
from actors.scoring import Scoring
from flowgrpo_ray.config import load
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import EncodeMeta, SampleMeta
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.views.status import PoolStatus

CONFIG = load(None, {"rewards": {"jpeg_compressibility": {}}})


class Site:
    """A pool of actors that a test plays: incarnations in `sick` fail every call but `ready`."""

    def __init__(
        self, replicas: int, sick: set[int] = frozenset(), bad_calls: Collection = (), **more
    ) -> None:
        self.sick, self.bad_calls = set(sick), list(bad_calls)
        self.handles: list[Handle] = []
        self.did: list[
            tuple[int, object]
        ] = []  # (incarnation, first argument), those that failed too
        self.pool = ActorPool(
            "worker",
            replicas,
            self.spawn,
            start_timeout_s=60,
            max_deaths=16,
            **more,
        )
        self.start()

    def spawn(self, index: int, incarnation: int) -> Handle:
        self.handles.append(Handle(lambda method, *args: self.does(incarnation, method, *args)))
        return self.handles[-1]

    def does(self, incarnation: int, method: str, *args):
        if method == "ready":
            return Process(1000 + incarnation, f"10.0.0.{incarnation}")
        self.did.append((incarnation, args[0] if args else None))
        if incarnation in self.sick or args[0] in self.bad_calls:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.answer(method, *args)

    def answer(self, method: str, *args):
        return args[0]

    def start(self) -> None:
        while any(member.starting for member in self.pool.members):
            for handle in self.handles:
                if not handle.killed and handle.calls and handle.calls[0].method == "ready":
                    self.step(handle)

    def step(self, handle: Handle) -> None:
        """An actor ends its oldest call, and the pool hears of it."""
        call = handle.calls.pop(0)
        call.end()
        self.pool.settle({call.refs[0]})

    @property
    def busy(self) -> list[Handle]:
        return [handle for handle in self.handles if handle.calls and not handle.killed]

    def play(self, draw: random.Random | None = None, *, sick_first: bool = True) -> None:
        """End calls until none is in flight: first those of sick actors, or as `draw` has it."""
        while busy := self.busy:
            if draw is not None:
                self.step(draw.choice(busy))
            else:
                fast = [h for h in busy if sick_first and self.handles.index(h) in self.sick]
                self.step((fast or busy)[0])


@pytest.fixture(autouse=True)
def without_ray(request, monkeypatch):
    if "ray_cluster" not in request.fixturenames:
        install(monkeypatch)


def submitted(site: Site, count: int, attempts: int = 3) -> tuple[list[int], list[Exception]]:
    """Tasks 0 … count-1 that are submitted again up to `attempts` times."""
    done, lost = [], []

    def submit(number: int) -> None:
        def failed(error: Exception) -> None:
            if task.attempts < attempts:
                site.pool.submit_again(task)
            else:
                lost.append(error)

        task = Task(
            f"work {number}",
            "work",
            (number,),
            (number,),
            600.0,
            lambda value, _: done.append(value),
            failed,
        )
        site.pool.submit(task)

    for number in range(count):
        submit(number)
    return done, lost


def test_a_sick_actor_spends_one_attempt_of_a_task_and_is_replaced():
    site = Site(4, sick={0})
    done, lost = submitted(site, 40)
    site.play()
    assert sorted(done) == list(range(40)) and not lost
    tries = [number for incarnation, number in site.did if incarnation == 0]
    assert len(tries) == 3 and len(set(tries)) == 3, (
        "no task twice, and after 3 failures it has no more work"
    )
    assert (
        site.pool.counts["taken_out"] == 1
        and site.pool.counts["repeated"] == 3
        and site.pool.counts["deaths"] == 0
    )
    site.start()
    submitted(site, 8)
    site.play()
    assert site.handles[0].killed and 4 in dict(site.did), "the new one works"


def test_the_status_of_a_pool_counts_its_actors_by_what_they_do_and_where_they_are():
    site = Site(2, sick={0})
    counts = dict.fromkeys(("deaths", "timeouts", "failed_starts", "taken_out", "repeated"), 0)
    nodes = {"10.0.0.0": 1, "10.0.0.1": 1}
    assert site.pool.status() == PoolStatus(target=2, ready=2, counts=counts, nodes=nodes)
    submitted(site, 20)
    assert site.pool.status() == PoolStatus(2, ready=2, busy=2, queued=16, counts=counts, nodes=nodes)
    site.play()
    site.pool._take_out(site.pool.members[0], "of this test")
    counts |= {"taken_out": 2, "repeated": 3}
    assert site.pool.status() == PoolStatus(
        2, ready=1, starting=1, counts=counts, nodes={"10.0.0.1": 1}
    )


def test_the_sick_one_gets_no_work_while_its_failures_are_not_yet_explained():
    site = Site(2, sick={0})
    done, _ = submitted(site, 20)
    while site.handles[0].calls:
        site.step(site.handles[0])
    assert [incarnation for incarnation, _ in site.did] == [0, 0, 0], (
        "the other one has not answered yet"
    )
    assert not site.pool.counts["taken_out"]
    site.play()
    assert sorted(done) == list(range(20)) and site.pool.counts["taken_out"] == 1


def test_a_call_that_nobody_can_do_is_not_the_actors_fault():
    site = Site(3, bad_calls={4, 5, 6, 7, 8, 9, 10})
    done, lost = submitted(site, 24)
    site.play()
    assert len(lost) == 7 and len(done) == 17 and site.pool.counts["taken_out"] == 0
    for number in range(4, 11):
        assert len({incarnation for incarnation, what in site.did if what == number}) == 3, (
            "three different actors"
        )


def test_an_actor_that_fails_now_and_then_stays():
    site = Site(2)
    done, lost = submitted(site, 30)
    for turn in range(60):
        for incarnation, handle in enumerate(site.handles):
            if handle.calls:
                site.sick = {0} if turn % 3 == 0 and incarnation == 0 else set()
                site.step(handle)
    assert sorted(done) == list(range(30)) and not lost
    assert site.pool.counts["repeated"] >= 5 and site.pool.counts["taken_out"] == 0


def test_a_method_that_still_works_does_not_hide_one_that_fails():
    site = Site(2, sick={0})
    does = site.does
    site.does = lambda incarnation, method, *args: (
        1 if method == "encode" else does(incarnation, method, *args)
    )
    done, lost = submitted(site, 12)
    for number in range(12):
        site.pool.submit(
            Task("encode", "encode", (), (number,), 60.0, lambda *_: None, lost.append)
        )
    site.play()
    assert len(done) == 12 and not lost and site.pool.counts["taken_out"] == 1


@settings(max_examples=150, deadline=None)
@given(
    replicas=st.integers(2, 6), data=st.data(), seed=st.integers(0, 10**6), tasks=st.integers(1, 40)
)
def test_whatever_the_order_every_task_is_done_while_fewer_actors_are_sick_than_a_task_has_attempts(
    replicas, data, seed, tasks
):
    sick = data.draw(
        st.sets(st.integers(0, replicas - 1), max_size=min(replicas - 1, MAX_ATTEMPTS - 1))
    )
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        site = Site(replicas, sick)
        done, lost = submitted(site, tasks, MAX_ATTEMPTS)
        site.play(random.Random(seed))
    assert sorted(done) == list(range(tasks)) and not lost and site.pool.idle
    tried = [pair for pair in site.did if pair[0] in sick]
    assert len(tried) == len(set(tried)), "a sick actor never has the same task twice"
    assert site.pool.counts["taken_out"] <= len(sick)


def test_a_task_that_all_have_failed_gets_a_new_actor_for_its_last_attempt():
    site = Site(1, sick={0})
    site.answer = lambda *_: EncodeMeta(0.0, (8,))
    sampling, refs = Sampling(CONFIG, site.pool, "sd3"), []
    sampling.encode([PromptRecord("a cat")], [(0,)], lambda *ref: refs.append(ref))
    site.play()
    assert len(refs) == 1 and [incarnation for incarnation, _ in site.did] == [0, 0, 1]
    assert site.pool.counts["taken_out"] == 1


def test_attempts_of_sampling_go_to_different_actors():
    meta = SampleMeta(0, "", 0.0, 0.0)
    site = Site(4, sick={0, 1})
    site.answer = lambda *_: meta
    sampling, ends = Sampling(CONFIG, site.pool, "sd3"), []
    for number in range(24):
        sampling.sample(
            f"shard {number}", (number,), number, None, [], lambda *answer: ends.append(answer)
        )
    site.play()
    assert len(ends) == 24 and sampling.calls["sample"] == 24
    site = Site(4, bad_calls={"request"})
    with pytest.raises(FlowGrpoError, match="failed 3 times: RuntimeError: CUDA error"):
        Sampling(CONFIG, site.pool, "sd3").sample(
            "shard", (0,), "request", None, [], print
        ) or site.play()
    assert len(set(site.did)) == 3


def scored(site: Site, calls: int, **settings) -> tuple[Scoring, dict]:
    site.answer = lambda method, prompts, *_: {
        "scores": {"bright": np.array([float(p) for p in prompts])},
        "seconds": 0.0,
        "notes": [],
    }
    config = load(None, {"rewards": {"bright": {"python": "own_rewards:brightness", **settings}}})
    scoring, results = Scoring(config, {"bright": site.pool}), {}
    for number in range(calls):
        records = [PromptRecord(str(8 * number + row)) for row in range(8)]
        scoring.submit(
            f"shard {number}",
            (1, number, 0),
            None,
            records,
            lambda s, n=number: results.update({n: s}),
            rewards=["bright"],
            groups=[(number, 1)],
        )
    return scoring, results


class Scores(Site):
    """Scores that prompt n gets n; a call with a prompt of `bad` fails, whoever does it."""

    bad: set[int] = frozenset()

    def does(self, incarnation, method, *args):
        if method == "score":
            prompts, part = args[0], args[3]
            args = (prompts if part is None else prompts[slice(*part)], *args[1:])
            if any(int(p) in self.bad for p in args[0]):
                self.did.append((incarnation, tuple(args[0])))
                raise ValueError("this image is beyond me")
            self.did.append((incarnation, tuple(args[0])))
            if incarnation in self.sick:
                raise RuntimeError("CUDA error")
            return self.answer(method, *args)
        return super().does(incarnation, method, *args)


@pytest.mark.parametrize("sick", [{0}, {0, 2}])
def test_no_image_loses_its_score_to_a_sick_reward_actor(sick):
    site = Scores(4, sick)
    scoring, results = scored(site, 32)
    site.play()
    assert len(results) == 32 and all(r.valid.all() for r in results.values())
    values = np.concatenate([results[n].scores["bright"] for n in range(32)])
    assert values.tolist() == list(range(256))
    assert not scoring.counts and site.pool.counts["taken_out"] == len(sick)
    assert all(len(prompts) == 8 for _, prompts in site.did), (
        "each call keeps the shape of the plan, so bits stay too"
    )


def test_an_image_that_no_actor_can_score_is_tried_on_two_and_masked_alone(caplog):
    site = Scores(3, sick={1})
    site.bad = {13}
    with caplog.at_level(logging.WARNING):
        scoring, results = scored(site, 12)
        site.play()
    assert [int(r.valid.sum()) for r in results.values()].count(8) == 11
    assert np.flatnonzero(~results[1].valid).tolist() == [5] and np.isnan(
        results[1].scores["bright"][5]
    )
    assert scoring.counts == {"failures/bright": 1, "retries/bright": 1}
    assert len({incarnation for incarnation, prompts in site.did if prompts == ("13",)}) == 2
    assert "another actor is asked" in caplog.text


def test_one_reward_actor_alone_does_as_before():
    site = Scores(1)
    site.bad = {3}
    scoring, results = scored(site, 2)
    site.play()
    assert np.flatnonzero(~results[0].valid).tolist() == [3] and results[1].valid.all()
    assert (
        len([1 for _, prompts in site.did if "3" in prompts]) == 2
        and not site.pool.counts["repeated"]
    )


def test_an_actor_that_fails_at_new_weights_is_replaced():
    site = Site(2, rest_s=5.0, needed=True)
    does = site.does
    site.does = lambda incarnation, method, *args: (
        1 / 0 if (incarnation, method) == (0, "load") else does(incarnation, method, *args)
    )
    site.pool.prepare_again(lambda handle: [(handle.load.remote(1), lambda _: None)])
    site.play()
    assert site.pool.all_ready and site.pool.counts["taken_out"] == 1 and site.handles[0].killed
    site = Site(2, rest_s=5.0, needed=True)
    site.does = lambda _, method, *args: 1 / 0
    site.pool.prepare_again(lambda handle: [(handle.load.remote(), lambda _: None)])
    with pytest.raises(FlowGrpoError, match="could not start.*division by zero"):
        site.play()


def test_one_of_four_reward_actors_is_sick_and_no_image_loses_its_score(ray_cluster, tmp_path):
    options = {"folder": str(tmp_path)}
    with Bench(
        config_of({"sick": {"python": "own_rewards:sick_on_one_actor", "options": options}}), 4
    ) as bench:
        for number in range(32):
            bench.submit(random_images(8, number), group=number)
        results = bench.finish(32)
        counts, taken_out = bench.scoring.counts, bench.pools["sick"].counts["taken_out"]
    for number, result in enumerate(results):
        assert result.valid.all() and np.allclose(
            result.scores["sick"], random_images(8, number).reshape(8, -1).mean(1) / 255
        )
    assert not counts and taken_out == 1
