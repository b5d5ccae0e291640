"""Pools that are resized while they work. Nearly all without Ray: the test plays the actors."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from fake_ray import Handle, install
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from actors import lifecycle, scaling
from actors.dispatch import Task
from actors.pool import ActorPool
from actors.process import Process
from flowgrpo_ray.config import load
from flowgrpo_ray.errors import ConfigError, FlowGrpoError
from flowgrpo_ray.views.status import PoolStatus


@pytest.fixture(autouse=True)
def without_ray(request, monkeypatch):
    if "ray_cluster" not in request.fixturenames:
        install(monkeypatch)


class Site:
    """A pool of actors that a test plays. They hold weights by slot, and fail work for others.

    Attributes:
        room: actors that the cluster can hold; the others wait to be placed.
        published: newest version by slot.
        done: numbers of tasks, as they ended.
    """

    def __init__(self, replicas: int, room: int = 99, name: str = "rollout", **more) -> None:
        self.room, self.published, self.done, self.lost = room, {"policy": 0}, [], []
        self.handles: list[Handle] = []
        self.pool = ActorPool(
            name,
            replicas,
            self.spawn,
            prepare=self.loads,
            start_timeout_s=60,
            max_deaths=2,
            rest_s=5.0,
            **more,
        )
        self.play(until=lambda: self.pool.all_ready)

    def spawn(self, index: int, incarnation: int) -> Handle:
        handle = Handle(lambda method, *args: self.does(handle, method, *args))
        handle.place, handle.index, handle.held, handle.did = incarnation, index, {}, []
        self.handles.append(handle)
        return handle

    def does(self, handle: Handle, method: str, *args):
        handle.did.append((method, *args))
        if method == "ready":
            return Process(
                1000 + handle.place, f"10.0.0.{handle.index}", f"node-{handle.index}"
            )
        if method == "load":
            handle.held[args[0]] = args[1]
            return args
        number, slot, version = args
        if handle.held.get(slot) != version:
            raise AssertionError(f"{slot} version {version} wanted, {handle.held} held")
        return number

    def load(self, handle: Handle, slot: str):
        wanted = (slot, self.published[slot])

        def check(answer) -> None:
            assert answer == wanted

        return [(handle.load.remote(*wanted), check)]

    def loads(self, handle: Handle):
        return [call for slot in self.published for call in self.load(handle, slot)]

    def publish(self, slot: str = "policy") -> None:
        version = self.published["policy"] + (slot == "policy")
        self.published = {**({} if slot == "policy" else self.published), slot: version}
        self.pool.prepare_again(lambda handle: self.load(handle, slot))

    def submit(self, *numbers: int, slot: str = "policy") -> None:
        for number in numbers:
            task = Task(
                f"work {number}",
                "work",
                (number, slot, self.published[slot]),
                (number,),
                600.0,
                lambda value, _: self.done.append(value),
                self.lost.append,
            )
            self.pool.submit(task)

    @property
    def alive(self) -> list[Handle]:
        return [handle for handle in self.handles if not handle.killed]

    @property
    def placed(self) -> list[Handle]:
        """Those that have found room: the oldest that are alive."""
        return self.alive[: self.room]

    @property
    def active(self) -> list[Handle]:
        return [handle for handle in self.placed if handle.calls]

    def step(self, handle: Handle) -> None:
        """An actor ends its oldest call, and the pool hears of it."""
        call = handle.calls.pop(0)
        call.end()
        self.pool.settle({call.refs[0]})

    def die(self, handle: Handle) -> None:
        """An actor is gone, and with it all its calls."""
        calls, handle.killed = list(handle.calls), True
        handle.calls.clear()
        for call in calls:
            call.refs[0].end(error=RayActorError(error_msg="it is gone"))
        self.pool.settle({call.refs[0] for call in calls})

    def play(self, until=lambda: False, draw: random.Random | None = None) -> None:
        """End calls until none is in flight, or until the pool is as wanted."""
        while not until() and self.active:
            self.step(draw.choice(self.active) if draw else self.active[0])

    @property
    def indices(self) -> list[int]:
        return [member.index for member in self.pool.members]


def test_a_larger_pool_gives_work_to_the_new_actors_once_they_are_ready():
    site = Site(1)
    site.submit(*range(8))
    site.pool.resize(3)
    assert site.pool.status().starting == 2 and site.pool.activity()[1:] == ["pending", "pending"]
    for new in site.handles[1:]:
        site.step(new)
        assert [call.method for call in new.calls] == ["load"]
        site.step(new)
        assert [call.method for call in new.calls] == ["work"] * 2
    site.play()
    assert sorted(site.done) == list(range(8)) and not site.lost
    status = site.pool.status()
    assert (status.target, status.ready, status.starting) == (3, 3, 0)
    assert site.pool.activity() == ["idle"] * 3


def test_actors_that_find_no_room_hold_up_nothing_and_make_no_calls_but_the_first():
    site = Site(2, room=2)
    site.pool.resize(4)
    for version in range(1, 4):
        site.submit(*range(10 * version, 10 * version + 10))
        site.play()
        assert site.pool.idle and not site.lost
        site.publish()
        site.play()
        assert site.pool.all_ready, "the new weights do not wait for them"
    pending = [handle for handle in site.alive if handle not in site.placed]
    assert [[call.method for call in handle.calls] for handle in pending] == [["ready"]] * 2, (
        "weights that are on their way to them would stay in the object store"
    )
    assert len(site.done) == 30
    site.room = 4
    site.submit(*range(100, 110))
    site.play()
    assert [handle.did[:2] for handle in pending] == [[("ready",), ("load", "policy", 3)]] * 2
    assert len(site.done) == 40 and not site.lost


def test_versions_that_come_out_while_an_actor_loads_are_loaded_before_its_first_task():
    site = Site(1)
    site.pool.resize(2)
    new = site.handles[1]
    site.step(new)  # it is up, and loads version 0
    assert [call.method for call in new.calls] == ["load"]
    site.publish()
    site.step(site.handles[0])
    assert site.pool.all_ready, "the one that was there has version 1"
    site.publish("ema")
    site.step(site.handles[0])
    assert site.pool.all_ready
    site.submit(0, slot="ema")
    site.submit(*range(1, 6))
    assert not any(call.method == "work" for call in new.calls)
    site.play(draw=random.Random(0))
    assert new.did[1:4] == [("load", "policy", 0), ("load", "policy", 1), ("load", "ema", 1)]
    assert sorted(site.done) == list(range(6)) and not site.lost
    assert any(did[0] == "work" for did in new.did)


def test_a_smaller_pool_lets_calls_end_and_then_its_last_actors():
    site = Site(3)
    site.submit(*range(9))
    assert site.pool.status().queued == 3
    site.pool.resize(1)
    assert site.pool.status() == PoolStatus(
        1, ready=1, busy=1, draining=2, queued=3, counts=site.pool.status().counts,
        nodes={f"10.0.0.{index}": 1 for index in range(3)},
    )  # fmt: skip
    assert site.pool.activity()[1:] == ["draining: work 1", "draining: work 2"]
    first, second, third = site.handles
    site.step(second)
    assert not second.killed, "it has another call"
    site.step(second)
    assert second.killed and site.indices == [0, 2] and not third.killed
    site.step(third)
    site.step(third)
    site.play()
    assert sorted(site.done) == list(range(9)) and not site.lost
    assert len([did for did in first.did if did[0] == "work"]) == 5
    assert site.indices == [0] and site.alive == [first]
    assert site.pool.counts == {} and site.pool.left == {"node-1", "node-2"}


def test_idle_actors_end_at_once_and_new_ones_take_the_free_places():
    site = Site(3)
    site.pool.resize(1)
    assert [handle.killed for handle in site.handles] == [False, True, True]
    site.pool.resize(2)
    site.play()
    assert site.indices == [0, 1] and site.pool.status().ready == 2


def test_up_and_down_again_takes_those_that_are_not_placed_yet():
    site = Site(2, room=2)
    site.submit(*range(8))
    site.pool.resize(5)
    assert [member.index for member in site.pool.members] == [0, 1, 2, 3, 4]
    site.pool.resize(3)
    assert [handle.killed for handle in site.handles] == [False, False, False, True, True]
    site.pool.resize(1)
    assert [handle.killed for handle in site.handles] == [False, False, True, True, True]
    site.play()
    assert sorted(site.done) == list(range(8)) and site.indices == [0]


def test_down_and_up_again_keeps_those_that_still_work():
    site = Site(3)
    site.submit(*range(6))
    site.pool.resize(1)
    site.pool.resize(2)
    assert [member.draining for member in site.pool.members] == [False, False, True]
    site.play()
    assert len(site.handles) == 3 and site.indices == [0, 1] and len(site.done) == 6


def test_one_that_is_being_replaced_goes_before_those_that_work():
    site = Site(3)
    site.submit(*range(9))
    site.die(site.handles[0])
    assert site.pool.counts["deaths"] == 1 and site.pool.activity()[0] == "starting"
    site.pool.resize(2)
    assert site.indices == [1, 2] and site.handles[3].killed
    site.play()
    assert sorted(site.done) == list(range(9)) and not site.lost and site.indices == [1, 2]


def test_a_draining_actor_that_dies_is_counted_and_not_replaced():
    site = Site(4)
    site.submit(*range(12))
    site.pool.resize(1)
    for handle in site.handles[1:]:
        site.die(handle)
    assert site.pool.counts == {"deaths": 3}, "3 are more than max_deaths, and nothing stops"
    assert site.indices == [0] and len(site.handles) == 4
    site.die(site.handles[0])
    assert site.indices == [0] and len(site.handles) == 5, "nor do they leave less to the others"
    site.play()
    assert sorted(site.done) == list(range(12)) and not site.lost


def test_the_target_outlives_deaths():
    site = Site(1)
    site.pool.resize(3)
    site.play()
    for _ in range(4):
        site.pool.forgive_deaths()
        site.submit(*range(6))
        site.die(site.alive[-1])
        site.play()
        assert len(site.alive) == 3 and site.pool.status().ready == 3
    site.pool.resize(1)
    site.submit(7)
    site.die(site.alive[0])
    site.play()
    assert len(site.alive) == 1 and site.pool.target == 1


def test_a_sync_does_not_wait_for_one_that_is_replaced_and_it_joins_with_the_new_weights():
    site = Site(2, room=2)
    site.room = 1
    site.submit(0, 1)
    site.die(site.handles[0])
    site.play()
    site.publish()
    site.play()
    assert site.pool.all_ready
    site.room = 2
    site.submit(*range(2, 8))
    site.play()
    assert site.handles[2].did[:2] == [("ready",), ("load", "policy", 1)]
    assert len(site.done) == 8 and not site.lost and site.pool.counts == {"deaths": 1}


def test_new_actors_have_no_deadline_until_they_are_up(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now[0])
    site = Site(1, room=1, asks="CPU 2, labels {'pool': 'rollout'}", needed=True)
    site.pool.resize(3)
    for _ in range(100):
        now[0] += 10.0
        site.pool.settle(set())
    assert len(site.alive) == 3 and site.pool.next_deadline() > now[0] + 1
    said = [r.message for r in caplog.records if "2 of 3 actors are not up" in r.message]
    assert 30 <= len(said) <= 34 and "each asks for CPU 2, labels {'pool': 'rollout'}" in said[0]
    site.room = 3
    site.step(site.handles[1])  # up: from now on it has a deadline, and is tried again
    now[0] += 61.0
    site.pool.settle(set())
    assert site.handles[1].killed and site.pool.counts == {"failed_starts": 1}
    now[0] += 6.0
    site.pool.settle(set())
    site.play()
    assert site.pool.status().ready == 3


def test_a_pool_that_has_lost_all_actors_says_what_it_waits_for(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now[0])
    site = Site(2, asks="CPU 2", needed=True)
    site.submit(0, 1)
    site.room = 0
    site.die(site.handles[0])
    site.die(site.handles[1])
    for _ in range(5):
        now[0] += 10.0
        site.pool.settle(set())
    [said] = [r.message for r in caplog.records if "are not up" in r.message]
    assert "2 of 2 actors are not up: they wait for resources (each asks for CPU 2)" in said
    assert said.endswith("the run waits for one, up to 60 s (pools.start_timeout_s)")


def test_a_new_actor_that_dies_or_fails_while_it_starts_is_tried_again():
    site = Site(1, needed=True)
    site.pool.resize(2)
    for deaths in range(1, 5):
        site.die(site.alive[1])
        assert site.pool.counts == {"deaths": deaths, "failed_starts": deaths}
        assert site.pool.activity() == ["idle", "cannot start"] and site.pool.target == 2
        site.pool.members[1].rests_until = 0.0
        site.pool.settle(set())
    site.play()
    assert site.pool.status().ready == 2


def test_a_task_that_an_actor_failed_does_not_wait_for_one_without_room():
    site = Site(1, room=1)
    site.pool.resize(2)
    task = Task("work 0", "work", (0, "policy", 0), (0,), 600.0, lambda value, _: site.done.append(value), site.lost.append)  # fmt: skip  # noqa: E501
    task.failed_on.add(0)
    assert not site.pool.has_another(task)
    site.pool.submit(task)
    site.play()
    assert site.done == [0]


def test_new_actors_stand_back_while_another_pool_has_none():
    scoring, rollout = Site(1, room=1, name="reward.ocr"), Site(1)
    scoring.pool.resize(3)
    rollout.submit(0)
    rollout.die(rollout.handles[0])
    scaling.make_room([scoring.pool, rollout.pool])
    assert len(scoring.alive) == 1 and rollout.pool.needs_room
    rollout.pool.resize(2)
    scaling.make_room([scoring.pool, rollout.pool])
    assert len(rollout.alive) == 2, "of its own it can use any"
    scoring.pool.settle(set())
    assert len(scoring.alive) == 1, "they wait"
    rollout.play()
    scaling.make_room([scoring.pool, rollout.pool])
    scoring.pool.settle(set())
    scoring.room = 3
    scoring.play()
    assert scoring.pool.status().ready == 3 and rollout.done == [0]


def test_a_new_actor_with_other_weights_stops_the_run():
    site = Site(1)
    site.pool.resize(2)
    new = site.handles[1]
    new.does = lambda method, *args: (
        site.does(new, method, *args) if method == "ready" else ("policy", 7)
    )
    with pytest.raises(AssertionError):
        site.play()


def test_learners_are_not_resized():
    pool = ActorPool(
        "colocated", 1, lambda *_: Handle(lambda *_: None), start_timeout_s=1, max_deaths=0,
        respawns=False,
    )  # fmt: skip
    with pytest.raises(FlowGrpoError, match="pool colocated cannot be resized"):
        pool.resize(2)


@settings(max_examples=300, deadline=None)
@given(
    replicas=st.integers(1, 4),
    room=st.integers(1, 6),
    acts=st.lists(
        st.one_of(
            st.integers(1, 6), st.sampled_from(["step", "step", "step", "die", "work", "publish"])
        ),
        max_size=60,
    ),
    seed=st.integers(0, 10**6),
)
def test_whatever_happens_every_task_is_done_once_under_its_weights(replicas, room, acts, seed):
    """Targets (numbers), answers, deaths, tasks and new versions in any order."""
    draw, submitted = random.Random(seed), 0
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        site = Site(replicas, max(room, replicas))
        target = replicas
        for act in acts:
            site.pool.forgive_deaths()
            if isinstance(act, int):
                site.pool.resize(act)
                target = act
            elif act == "step" and site.active:
                site.step(draw.choice(site.active))
            elif act == "die" and site.active:
                suspects = [h for h in site.active if h.calls[0].method != "work"]
                victim = draw.choice(site.active)
                if victim in suspects or not killers(site, victim):
                    site.die(victim)
            elif act == "work" and site.pool.all_ready:
                site.submit(*range(submitted, submitted + 5))
                submitted += 5
            elif act == "publish" and site.pool.all_ready:
                site.play(lambda: site.pool.idle, draw)
                site.publish()
                if draw.random() < 0.5:
                    site.play(lambda: draw.random() < 0.3, draw)
                    target = draw.randint(1, 6)
                    site.pool.resize(target)
                site.play(lambda: site.pool.all_ready, draw)
                assert site.pool.all_ready
            taking = [m for m in site.pool.members if not m.draining]
            assert len(taking) == target == site.pool.status().target
            assert len({m.index for m in site.pool.members}) == len(site.pool.members)
        site.room = 99
        for member in site.pool.members:
            member.rests_until = 0.0
        site.pool.settle(set())
        site.play(draw=draw)
        assert sorted(site.done) == list(range(submitted)) and not site.lost
        assert site.pool.idle and len(site.pool.members) == target == site.pool.status().ready
        assert {id(m.handle) for m in site.pool.members} == {id(h) for h in site.alive}
        assert all(h.held == site.published for h in site.alive)


def killers(site: Site, handle: Handle) -> bool:
    """Whether the call that an actor is at has cost one its life already: a second death would be held against it."""
    member = next(m for m in site.pool.members if m.handle is handle)
    return bool(next(iter(member.running.values())).task.kills)


CONFIG = load(None, {"rewards": {"jpeg_compressibility": {}, "ocr": {}}, "pools.reward.ocr.num_cpus": 2})  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"rollout": 0}, r"rollout: a pool must have at least 1 actor, got 0; `stop` ends the run"),
        ({"rollout": 1025}, "rollout: a pool can have at most 1024 actors, got 1025"),
        ({"rollout": 2.5}, "rollout: the number of actors must be an integer, got 2.5"),
        ({"rollout": True}, "rollout: the number of actors must be an integer, got True"),
        ({"ocr": 2}, r"there is no pool 'ocr'; did you mean reward\.ocr\?"),
        ({"rolout": 2}, r"there is no pool 'rolout'; did you mean rollout\?"),
        ({"colocated": 2}, "there is no pool 'colocated'; the choices are"),
        ({"learner": 4}, r"learner: the number of learner ranks .* pools\.learner\.replicas=4: it"),
        ({"rollout": 2, "reward.ocr": 0}, "reward.ocr: a pool must have at least 1 actor"),
        ({"rollout": 0, "x": 1}, r"rollout: a pool must .*; there is no pool 'x'"),
        ({}, "name a pool and how many actors it shall have, for example rollout=2"),
    ],
)
def test_what_is_not_possible_changes_nothing(targets, message):
    sites = {name: Site(1, name=name) for name in ("rollout", "reward.ocr")}
    with pytest.raises(ConfigError, match=message):
        scaling.scale(CONFIG, [site.pool for site in sites.values()], targets)
    assert all(len(site.handles) == 1 and site.pool.target == 1 for site in sites.values())


def test_rollout_actors_that_are_learner_ranks_are_refused():
    config = load(None, {"rewards": {"ocr": {}}, "pools.placement": "colocated"})
    reward = Site(1, name="reward.ocr")
    for name in ("rollout", "colocated"):
        with pytest.raises(
            ConfigError,
            match=f"{name}: rollout actors are the learner ranks under placement colocated, .* "
            r"pools\.learner\.replicas=2",
        ):
            scaling.scale(config, [reward.pool, SimpleNamespace(name="colocated")], {name: 2})


def test_what_is_done_is_said_and_what_does_not_fit_now(monkeypatch):
    sites = {name: Site(2, name=name) for name in ("rollout", "reward.ocr")}

    def free() -> dict[str, float]:  # what new actors take is theirs at once
        return {"CPU": 8.0 - sum(len(site.handles) for site in sites.values())}

    monkeypatch.setattr(scaling, "ray", SimpleNamespace(available_resources=free))
    pools = [site.pool for site in sites.values()]
    assert (
        scaling.scale(CONFIG, pools, {"rollout": 1, "reward.ocr": 3})
        == "rollout: 2 -> 1 actor; reward.ocr: 2 -> 3 actors"
    )
    assert scaling.scale(CONFIG, pools, {"rollout": 1}) == "rollout: 1 actor already"
    assert scaling.scale(CONFIG, pools, {"reward.ocr": 5}) == (
        "reward.ocr: 3 -> 5 actors. Not all of the new ones fit now (CPU: asked 4, free 3): the others start when the "
        "cluster has room for them"
    )


def test_nodes_are_left_by_the_last_actor_of_the_run():
    rollout, reward = Site(3), Site(2, name="reward.ocr")
    pools = [rollout.pool, reward.pool]
    rollout.pool.resize(1)
    assert scaling.emptied(pools) == {"node-2"}, "a reward actor is still on node-1"
    reward.pool.resize(1)
    assert scaling.emptied(pools) == {"node-1"}
    assert scaling.emptied(pools) == set()


def test_time_is_counted_by_the_actors_that_were_up(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now[0])
    site = Site(2)
    site.pool.settle(set())
    site.pool.restart_clock()
    now[0] += 10.0
    site.pool.resize(3)
    now[0] += 10.0
    site.play()
    assert site.pool.count_time() == 40.0
    now[0] += 10.0
    site.pool.resize(1)
    now[0] += 10.0
    assert site.pool.count_time() == 40.0 + 30.0 + 10.0
