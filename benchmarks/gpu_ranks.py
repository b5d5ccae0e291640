"""Gradients of several learner ranks against one, for every sharding; a part of `benchmarks.gpu_check --ranks N`.

The parent samples and takes the gradients of one rank; then N processes, each with a device of its own, work through
the same shards. Three shards for two ranks: one rank fills up with a shard of weight 0.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.numpy import load_file, save_file

from benchmarks.baseline import RUN_ID
from benchmarks.gpu_check import GIB, RECORDS, Work, build, items, sample
from benchmarks.gpu_models import perturbed
from benchmarks.learner import random_scores
from flowgrpo_ray import device as devices
from flowgrpo_ray.config.load import Config, from_tree
from flowgrpo_ray.data.plan import StepPlan, plan_step
from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.learning import parallel
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.base import Policy

SHARDINGS = ("none", "full")
# Of a gradient tensor's norm. Half precision: the backward pass of attention adds up in no fixed order on a GPU.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}


def gradients(
    learner: Learner, plan: StepPlan, work: Work, rank: int = 0, world_size: int = 1
) -> tuple[Arrays, dict[str, float]]:
    """Gradients of one update, whole and as the optimizer gets them, and the update's metrics."""
    found: Arrays = {}

    def keep(*_: Any) -> None:
        for key, param in learner.parameters.items():
            found[key] = parallel.whole(param.grad).float().cpu().numpy().copy()

    hook = learner.optimizer.register_step_pre_hook(keep)
    learner.begin_step(plan)
    learner.add_scores(random_scores(learner.config, plan))
    for arguments in items(plan, work, rank, world_size):
        learner.accumulate(*arguments)
    metrics = learner.apply()
    hook.remove()
    return found, metrics


def prepare(model: str, config: Config, device: torch.device, small: bool) -> Policy:
    """The policy with an adapter that does something."""
    policy = build(model, config, device, small)
    lora.attach(policy, config.lora, config.train.seed)
    lora.write_state(policy, perturbed(lora.read_state(policy)))
    return policy


def with_sharding(config: Config, sharding: str) -> Config:
    """Without clipping, which would hide a wrong scale."""
    tree = config.model_dump(mode="json")
    tree["train"] |= {"sharding": sharding, "max_grad_norm": 1e9}
    tree["pools"]["placement"] = "split"
    return from_tree(tree)


def compare(model: str, config: Config, device: torch.device, *, small: bool, world_size: int) -> dict[str, Any]:
    """Relative differences of the gradients by sharding, and the checks."""
    plan = plan_step(config, RECORDS, 0)
    with tempfile.TemporaryDirectory(prefix="flowgrpo-ranks-") as folder:
        policy = prepare(model, config, device, small)
        work, _ = sample(policy, config, plan, small)
        learner = Learner(policy, with_sharding(config, "none"), run_id=RUN_ID)
        single, metrics = gradients(learner, plan, work)
        save_file(single, Path(folder, "single.safetensors"))
        del policy, learner
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        job = (model, config.model_dump(mode="json"), device.type, small, world_size, work, folder)
        try:
            multiprocessing.spawn(_rank, job, nprocs=world_size)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            raise FlowGrpoError(f"a rank failed (out of GPU memory: lower --micro-batch):\n{error}") from None
        cases = {name: [torch.load(Path(folder, f"{name}-{rank}.pt"), weights_only=True) for rank in range(world_size)]
                 for name in SHARDINGS}
    limit = TOLERANCES[config.model.dtype]
    checks = []
    for name, ranks in cases.items():
        worst = max(rank["largest"] for rank in ranks)
        same = all(rank["valid_samples"] == metrics["valid_samples"] for rank in ranks)
        seconds, peak = max(r["seconds"] for r in ranks), max(r["peak_gib"] for r in ranks)
        checks.append({
            "name": f"{world_size} ranks, sharding {name}: the gradients of one rank", "ok": worst <= limit and same,
            "found": f"largest relative difference {worst:.2e} (limit {limit:g}), {ranks[0]['tensors']} tensors, "
                     f"{seconds:.1f} s, peak {peak:.2f} GiB a rank"})
    return {"world_size": world_size, "cases": cases, "checks": checks}


def _rank(
    rank: int, model: str, tree: dict[str, Any], kind: str, small: bool, world_size: int, work: Work, folder: str
) -> None:
    """What one rank does."""
    config = from_tree(tree)
    if kind == "cuda":  # as in an actor: a rank sees its own GPU alone (CUDA is not initialised in this process yet)
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank] if visible else str(rank)
    device = devices.configure_process(on_gpu=kind == "cuda", cpu_threads=config.model.cpu_threads)
    parallel.join(rank, world_size, dist.FileStore(f"{folder}/meeting", world_size), device, timeout_s=300,
                  start_timeout_s=300)
    plan, single = plan_step(config, RECORDS, 0), load_file(Path(folder, "single.safetensors"))
    for name in SHARDINGS:
        policy = prepare(model, config, device, small)
        learner = Learner(policy, with_sharding(config, name), run_id=RUN_ID, rank=rank, world_size=world_size)
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        found, metrics = gradients(learner, plan, work, rank, world_size)
        seconds = time.perf_counter() - started
        torch.save({"largest": max(_relative(found[key], single[key]) for key in single), "tensors": len(found),
                    "valid_samples": metrics["valid_samples"], "log_ratio_max": metrics["first_update_log_ratio_max"],
                    "seconds": seconds, "peak_gib": devices.peak_memory_bytes(device) / GIB},
                   Path(folder, f"{name}-{rank}.pt"))
        del policy, learner
        gc.collect()
        dist.barrier()
    dist.destroy_process_group()


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm; two zeros are equal."""
    apart, size = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected))
    return apart / size if size else (0.0 if apart == 0 else float("inf"))
