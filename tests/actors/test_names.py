"""Actors are named after their run, and show what they do."""

from __future__ import annotations

import psutil
from runs import Watcher, run, small_config

from actors.names import ActorNames
from actors.process import Shown


def test_one_that_replaces_another_has_a_name_of_its_own():
    names = ActorNames("first", "abc-1")
    assert [names.new("rollout", 3), names.new("rollout", 3), names.new("rollout", 4), names.new("learner", 3)] == [
        "first/rollout-3", "first/rollout-3.1", "first/rollout-4", "first/learner-3"]
    assert names.namespace != ActorNames("first", "abc-2").namespace


def test_outside_an_actor_repr_says_what_is_done():
    class Some(Shown):
        role = "scores"

    some = Some()
    assert repr(some) == "Some scores"
    some.shows("scores 4 images")
    assert repr(some) == "Some scores 4 images"


class Looking(Watcher):
    """Notes the titles of the rollout actor's process, and the names that Ray knows once a step is done."""

    def __init__(self):
        super().__init__()
        self.titles, self.names = set(), []

    def activity(self, doing):
        for pid in [member.pid for pool in self.controller.pools if pool.name == "rollout" for member in pool.members]:
            self.titles |= {psutil.Process(pid).cmdline()[0]} if pid else set()

    def row(self, row):
        import ray

        mine = self.controller.names.namespace
        self.names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == mine]


def test_names_and_titles_of_a_run(ray_cluster, tmp_path):
    watcher = Looking()
    run(small_config(tmp_path, "named", steps=1), watcher)
    assert sorted(watcher.names) == ["named/learner-0", "named/reward.jpeg_compressibility-0", "named/rollout-0"]
    assert "ray::named/rollout-0 samples at version 0" in watcher.titles, watcher.titles
