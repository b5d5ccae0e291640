"""The reward pools by themselves, and what scoring adds to a training step.

    python -m benchmarks.scoring [CONFIG] [KEY=VALUE ...] [--reward NAME] [--replicas 1 2] [--shards 24] [--rounds 3]
                                 [--steps 6] [--warmup 2] [--json]

- throughput: `--shards` shards of the configuration's size (words drawn in its image size) go through a real pool of 1, 2, …
  reward actors of `--reward` (default: the configuration's first), and through the same reward in a plain loop in this
  process. Told are images/s and the ratio to the plain loop; the sides take turns.
- overlap: the configuration is trained for `warmup` + `steps` steps. Told are the seconds that the scoring calls of a step
  took, all actors together, and the time from the last shard that was sampled to the last one that was scored: what
  scoring adds to the step beyond sampling. 1 - their ratio is the hidden share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import ray
from rich.console import Console

from actors.controller import Controller
from actors.events import drive
from actors.placement import actor_options
from actors.pool import ActorPool
from actors.reward import RewardActor
from actors.run import connected, train
from actors.scoring import Scoring
from actors.step import StepBoard
from benchmarks.measure import configuration, cores, machine, parser, print_machine, print_table, run_main, shown, spread
from benchmarks.whole_step import only_steps
from flowgrpo_ray.config.load import Config, from_tree
from flowgrpo_ray.data.plan import StepPlan
from flowgrpo_ray.data.prompts import PromptRecord, load_prompts
from flowgrpo_ray.errors import ConfigError, nearest
from flowgrpo_ray.rewards import get
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.tiny.drawing import LONGEST, neat
from flowgrpo_ray.views.live import PlainView


def drawn_images(config: Config, shards: int) -> tuple[list[np.ndarray], list[list[PromptRecord]]]:
    """Shards of words as the configuration's prompts ask for, uint8 [m, H, W, 3], and their prompts."""
    from PIL import Image

    records, m, s = load_prompts(config.data.train_prompts), config.sampling.micro_batch, config.sampling
    images, prompts = [], []
    for number in range(shards):
        part = [records[(number * m + i) % len(records)] for i in range(m)]
        words = [r.prompt.split('"')[1][:LONGEST] if '"' in r.prompt else "WORD" for r in part]
        rows = [Image.fromarray(neat(word, Random(i))).resize((s.width, s.height)) for i, word in enumerate(words)]
        images.append(np.stack([np.asarray(row) for row in rows]))
        prompts.append(part)
    return images, prompts


class Pool:
    """A pool of reward actors that is up, and the way through it."""

    def __init__(self, config: Config, name: str, replicas: int) -> None:
        reward = config.rewards[name]

        def spawn(index: int, incarnation: int) -> Any:
            options = actor_options(config.reward_pool(name), f"benchmark-{replicas}-{index}-{incarnation}")
            return ray.remote(RewardActor).options(**options).remote(
                name, reward.spec(name), reward.options, reward.self_test, config.reward_pool(name).nice)

        self.pool = ActorPool(f"reward.{name}", replicas, spawn, start_timeout_s=config.pools.start_timeout_s, max_deaths=0)
        self.scoring, self.name = Scoring(config, {name: self.pool}), name
        drive([self.pool], lambda: self.pool.all_ready, "the actors")

    def score(self, images: Sequence[ray.ObjectRef], records: Sequence[list[PromptRecord]]) -> float:
        """Seconds until every shard has its scores."""
        answered: list[Any] = []
        started = time.perf_counter()
        for number, (ref, part) in enumerate(zip(images, records, strict=True)):
            self.scoring.submit(f"shard {number}", (0, number, 0), ref, part, answered.append, rewards=[self.name],
                                groups=[(number, 1)])
        drive([self.pool], lambda: len(answered) == len(images), "the scores")
        return time.perf_counter() - started


def throughput(config: Config, name: str, replicas: Sequence[int], shards: int, rounds: int) -> dict[str, Any]:
    """Images/s of the plain loop and of pools of so many replicas."""
    images, records = drawn_images(config, shards)
    reward = config.rewards[name]
    plain = get(reward.spec(name), **reward.options)
    count = sum(map(len, records))
    seconds: dict[str, list[float]] = {"plain loop": [], **{f"{n} replicas": [] for n in replicas}}
    with connected(config):
        refs = [ray.put(shard) for shard in images]
        pools = {f"{n} replicas": Pool(config, name, n) for n in replicas}
        for repeat in range(-1, rounds):
            started = time.perf_counter()
            for shard, part in zip(images, records, strict=True):
                plain.score(shard, [r.prompt for r in part], [r.reward_metadata for r in part])
            taken = {"plain loop": time.perf_counter() - started}
            taken |= {side: pool.score(refs, records) for side, pool in pools.items()}
            if repeat >= 0:
                for side, value in taken.items():
                    seconds[side].append(value)
        for pool in pools.values():
            pool.pool.shutdown()
    base = statistics.median(seconds["plain loop"])
    return {side: {"images_per_s": spread([count / value for value in values]),
                   "ratio": base / statistics.median(values)} for side, values in seconds.items()}


class Watched(Controller):
    """Notes when a step's last shard was sampled, and when it was scored."""

    tails: list[float]
    calls: list[float]

    def train_step(self, plan: StepPlan) -> Row:
        self._sampled = self._scored = 0.0
        row = super().train_step(plan)
        self.tails.append(self._scored - self._sampled)
        self.calls.append(sum(self.scoring.seconds.values()))
        return row

    def _feed(self, board: StepBoard, updates: list[Row]) -> bool:
        if board.all_sampled and not self._sampled:
            self._sampled = time.perf_counter()
        if len(board.complete) == len(board.plan.groups) and not self._scored:
            self._scored = time.perf_counter()
        return super()._feed(board, updates)


def overlap(config: Config, steps: int, warmup: int) -> dict[str, Any]:
    """Seconds of scoring in a step, and those that it adds beyond sampling."""

    class Here(Watched):
        tails: list[float] = []
        calls: list[float] = []

    with tempfile.TemporaryDirectory(prefix="fgs") as folder:
        short = only_steps(config, folder, "overlap", warmup + steps)
        train(short, PlainView(short, Console(stderr=True, quiet=True)), controller_class=Here)
    tails, calls = Here.tails[warmup:], Here.calls[warmup:]
    return {"scoring_s": spread(calls), "added_s": spread(tails),
            "hidden_share": 1 - statistics.median(tails) / statistics.median(calls)}


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a command line."""
    config = configuration(options.words)
    name = options.reward or next(iter(config.rewards))
    if name not in config.rewards:
        raise ConfigError(f"--reward {name}: the configuration has no such reward{nearest(name, config.rewards)}")
    tree = config.model_dump(mode="json")
    room = from_tree(tree | {"pools": tree["pools"] | {  # as many CPUs as all pools reserve together
        "reward": {name: tree["pools"]["reward"].get(name, {}) | {"replicas": sum(options.replicas)}}}})
    return {"machine": machine(), "reward": name,
            "throughput": throughput(room, name, options.replicas, options.shards, options.rounds),
            "overlap": overlap(config, options.steps, options.warmup)}


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    print_machine(result["machine"])
    print_table(["reward " + result["reward"], "images/s", "ratio to the plain loop"],
                [[side, shown(row["images_per_s"], 1), f"{row['ratio']:.2f}"] for side, row in result["throughput"].items()])
    found = result["overlap"]
    print(f"scoring calls of a step: {shown(found['scoring_s'])} s; added to the step beyond sampling: "
          f"{shown(found['added_s'])} s; hidden: {found['hidden_share']:.0%} (on {cores()} cores)")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    p = parser(__doc__)
    p.add_argument("--reward", help="a reward of the configuration; default its first")
    p.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    p.add_argument("--shards", type=int, default=24)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--warmup", type=int, default=2)
    return run_main(benchmark, p, show, argv)


if __name__ == "__main__":
    sys.exit(main())
