"""Reward pools and the driver's loop around them, without anything that samples or learns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import own_rewards
import ray

from actors.events import drive
from actors.placement import actor_options
from actors.pool import ActorPool
from actors.reward import RewardActor
from actors.scoring import Scoring, ShardScores
from flowgrpo_ray.config import Config, load
from flowgrpo_ray.data.prompts import PromptRecord


@dataclass
class Bench:
    """Use as a context manager; `replicas` actors per reward."""

    config: Config
    replicas: int = 1
    start_timeout_s: float = 60
    max_deaths: int = 8
    results: dict[tuple, ShardScores] = field(default_factory=dict)

    def __enter__(self) -> Bench:
        self.pools = {}
        for name, reward in self.config.rewards.items():
            def spawn(index, incarnation, name=name, reward=reward):
                threads = self.config.model.cpu_threads
                options = actor_options(self.config.reward_pool(name), f"{id(self)}-{name}-{index}-{incarnation}",
                                        cpu_threads=threads)
                return ray.remote(RewardActor).options(**options).remote(
                    name, reward.spec(name), reward.options, reward.self_test, cpu_threads=threads,
                    group_size=self.config.sampling.group_size)
            self.pools[name] = ActorPool(
                f"reward.{name}", self.replicas, spawn,
                start_timeout_s=self.start_timeout_s, max_deaths=self.max_deaths, rest_s=0.2)
        self.scoring = Scoring(self.config, self.pools)
        self.drive(lambda: all(pool.all_ready for pool in self.pools.values()))
        return self

    def __exit__(self, *exc):
        for pool in self.pools.values():
            pool.shutdown()

    def submit(self, images, *, group=0, shard=0, shards=1, prompt="p", step=1, height=None, groups=None, prompts=None):
        records = [PromptRecord(text, height=height) for text in prompts or [prompt] * len(images)]
        order = (step, group, shard)
        self.scoring.submit(
            f"group {group} shard {shard}", order, ray.put(images), records,
            lambda scores: self.results.__setitem__(order, scores), rewards=self.scoring.due(step),
            groups=groups or [(group, shards)])

    def drive(self, done):
        drive(list(self.pools.values()), done, "the test")

    def finish(self, shards):
        self.drive(lambda: len(self.results) == shards)
        self.scoring.check_budget()
        return [self.results[key] for key in sorted(self.results)]


def config_of(rewards: dict, **more) -> Config:
    return load(None, {"rewards": rewards, "pools.reward": {name: {"num_cpus": 0.1} for name in rewards}, **more})


def random_images(n, seed=0, victim=None):
    images = np.random.default_rng(seed).integers(0, 200, (n, 8, 8, 3), np.uint8)
    if victim is not None:
        images[victim, 0, 0] = own_rewards.VICTIM
    return images
