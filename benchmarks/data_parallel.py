"""Whole training steps in plain data-parallel processes: what `accelerate launch` gives, at the shapes of the published code.

    python -m benchmarks.data_parallel [CONFIG] [KEY=VALUE ...] [--processes 2] [--steps 5] [--warmup 1] [--json]

Every process has the whole model, samples its part of every group, scores it with its own copy of the rewards, and
trains on it; scores and gradients meet in `torch.distributed`. A micro-batch holds images of several prompts, and its
rows are a group's size, as the published sampler draws them (every prompt repeated, spread over the processes). Nothing
is published, proven or recorded, and nothing overlaps: it is the least that such a program does, with this project's
model code. `benchmarks.whole_step` measures actors against it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.baseline import PHASES, Scored, Sequential
from benchmarks.measure import configuration, machine, parser, print_machine, print_table, run_main, shown, spread
from flowgrpo_ray import device as devices
from flowgrpo_ray.config.load import Config, divisors, from_tree
from flowgrpo_ray.data.plan import MicroBatch, StepPlan
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import SampleRequest
from flowgrpo_ray.errors import ConfigError, FlowGrpoError
from flowgrpo_ray.learning import parallel
from flowgrpo_ray.policies import load_policy
from flowgrpo_ray.preflight import check
from flowgrpo_ray.rewards import get


def spread_over(plan: StepPlan, group_size: int, processes: int) -> StepPlan:
    """The same step with micro-batches of several groups, of which every process has its part of the samples.

    Raises:
        ConfigError: the groups cannot be dealt out so.
    """
    if group_size % processes:
        raise ConfigError(f"{processes} processes cannot share groups of {group_size} samples equally (sampling.group_size)")
    together = max(d for d in divisors(len(plan.updates[0])) if d <= processes)
    part, groups, shards = group_size // processes, [], []
    for first in range(0, len(plan.groups), together):
        batch = plan.groups[first : first + together]
        if len({(group.height, group.width, group.record.negative_prompt) for group in batch}) > 1:
            raise ConfigError("the prompts differ in image size or negative prompt: micro-batches of several prompts need one")
        groups += [replace(group, window=batch[0].window) for group in batch]
        numbers = tuple(group.group for group in batch)
        shards += [MicroBatch(numbers, rank, tuple(range(rank * part, (rank + 1) * part))) for rank in range(processes)]
    return replace(plan, groups=tuple(groups), shards=tuple(shards), training=tuple(shards))


class DataParallel(Sequential):
    """One process of several."""

    def plan(self, records: Sequence[PromptRecord], step: int) -> StepPlan:
        return spread_over(super().plan(records, step), self.config.sampling.group_size, self.world_size)

    def publish(self, version: int) -> None:
        """Sampler and learner are one model."""

    def bind(self, request: SampleRequest) -> str:
        return ""

    def gather(self, scores: Scored) -> Scored:
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, scores)
        return {shard: values for part in parts for shard, values in part.items()}


def _process(rank: int, tree: dict[str, Any], kind: str, processes: int, steps: int, warmup: int, folder: str) -> None:
    """What one process does; it leaves its times in the folder."""
    config = from_tree(tree)
    device = devices.configure_process(on_gpu=kind == "cuda", cpu_threads=config.model.cpu_threads)
    records, policy = check(config).train, load_policy(config.model, device=device)
    store = dist.FileStore(f"{folder}/meeting", processes)
    parallel.join(rank, processes, store, device, start_timeout_s=600, timeout_s=600)
    rewards = {name: get(reward.spec(name), **reward.options) for name, reward in config.rewards.items()}
    loop = DataParallel(config, policy, rewards, rank=rank, world_size=processes)
    rows = []
    for step in range(warmup + steps):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        phases = loop.step(records, step)
        dist.barrier()
        rows.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu,
                     "phases": {name: timing.cpu for name, timing in phases.items()}})
    torch.save(rows[warmup:], Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def measure(config: Config, *, processes: int, steps: int, warmup: int, device: str = "cpu") -> dict[str, Any]:
    """Times of `steps` steps after `warmup`: wall seconds, and CPU seconds of all processes together.

    Raises:
        FlowGrpoError: a process failed.
    """
    found = machine()
    tree = config.model_dump(mode="json")
    tree["train"]["ratio_tolerance"] = 1.0  # shapes are not the plan's; sampler and learner have the same ones all the same
    with tempfile.TemporaryDirectory(prefix="flowgrpo-processes-") as folder:
        try:
            multiprocessing.spawn(_process, (tree, device, processes, steps, warmup, folder), nprocs=processes)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            raise FlowGrpoError(f"a process failed:\n{error}") from None
        ranks = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(processes)]
    walls = [row["wall"] for row in ranks[0]]
    cpu = [sum(rank[step]["cpu"] for rank in ranks) for step in range(steps)]
    images = config.sampling.group_size * config.sampling.groups_per_step
    phases = {name: spread([sum(rank[step]["phases"][name] for rank in ranks) for step in range(steps)]) for name in PHASES}
    return {"benchmark": "data_parallel", "machine": found, "processes": processes, "images": images,
            "step_seconds": spread(walls), "cpu_seconds": spread(cpu), "phases": phases, "walls": walls}


def show(result: Mapping[str, Any]) -> None:
    print_machine(result["machine"])
    print_table(["phase", "CPU s a step, all processes"], [[name, shown(p)] for name, p in result["phases"].items()])
    print(f"{result['processes']} data-parallel processes: {shown(result['step_seconds'])} s a step of {result['images']} "
          f"images, {shown(result['cpu_seconds'])} CPU seconds of all")


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--steps", type=int, default=5, help="measured steps")
    p.add_argument("--warmup", type=int, default=1, help="steps before them")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")

    def work(options: argparse.Namespace) -> dict[str, Any]:
        return measure(configuration(options.words), processes=options.processes, steps=options.steps,
                       warmup=options.warmup, device=options.device)

    return run_main(work, p, show, argv)


if __name__ == "__main__":
    raise SystemExit(main())
