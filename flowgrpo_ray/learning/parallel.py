"""Parallelism of the learner, applied to a policy from outside: replicated base or FSDP2, and the few collectives.

`none`: the base is whole on every rank and LoRA gradients are summed by one all-reduce per update. `full`: FSDP2
(`fully_shard`) over every block and the root. `hybrid`: FSDP2 inside groups of `shard_size` ranks, replicas across.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowgrpo_ray import device as devices
from flowgrpo_ray.policies.base import Policy


def join(rank: int, world_size: int, init_method: str, device: torch.device, timeout_s: float) -> None:
    """Join the learner group; a rank that is gone shows as an error after `timeout_s` at the latest."""
    dist.init_process_group(devices.backend_of(device), init_method=init_method, rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=timeout_s))


def choose_sharding(sharding: str, policy: Policy, world_size: int) -> str:
    """Resolve `auto`: `none` on CPU, on one rank, and where the base takes at most half of the free GPU memory."""
    if sharding != "auto":
        return sharding
    free = devices.free_memory_bytes(policy.device)
    size = sum(p.numel() * p.element_size() for m in policy.modules.values() for p in m.parameters())
    return "none" if world_size == 1 or free is None or size <= (free + size) // 2 else "full"


def shard(policy: Policy, sharding: str, shard_size: int | None, world_size: int) -> None:
    """Shard the policy's modules in place (nothing to do for `none`)."""
    if sharding == "none":
        return
    kind = policy.device.type
    if sharding == "hybrid":
        size = shard_size or world_size
        mesh = init_device_mesh(kind, (world_size // size, size), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(kind, (world_size,), mesh_dim_names=("shard",))
    for module in policy.modules.values():
        for block in [m for m in module.modules() if type(m).__name__ in policy.blocks]:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank (a collective where it is sharded)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full tensor into a possibly sharded one, in place."""
    value = value.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements)
    with torch.no_grad():
        target.copy_(value)


def sum_gradients(parameters: list[nn.Parameter], world_size: int) -> None:
    """Turn every rank's own gradients into their sum over ranks, in one all-reduce for replicated parameters.

    FSDP2 has reduced already, to the mean over ranks: undo the division.
    """
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if world_size == 1:
        return
    if isinstance(parameters[0], DTensor):
        for p in parameters:
            p.grad.mul_(world_size)
        return
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    offset = 0
    for p in parameters:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def reduce_sum(values: torch.Tensor, world_size: int) -> torch.Tensor:
    if world_size > 1:
        dist.all_reduce(values)
    return values


def reduce_max(values: torch.Tensor, world_size: int) -> torch.Tensor:
    if world_size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
