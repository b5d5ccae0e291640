"""Parallelism of the learner, applied to a policy from outside: replicated base or FSDP2, and the few collectives.

`none`: the base is whole on every rank and LoRA gradients are summed by one all-reduce per update. `full`: FSDP2
(`fully_shard`) over every block and the root. `hybrid`: FSDP2 inside groups of `shard_size` ranks, replicas across.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowgrpo_ray import device as devices
from flowgrpo_ray.errors import ConfigError, FlowGrpoError
from flowgrpo_ray.policies.base import Policy

GIB = 2**30


def open_store(host: str) -> dist.TCPStore:
    """A store on this node where ranks meet; its port is free, and taken at once."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def reach_store(address: tuple[str, int], timeout_s: float) -> dist.TCPStore:
    """The store that another rank has opened."""
    return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join(
    rank: int, world_size: int, store: dist.Store, device: torch.device, *, timeout_s: float, start_timeout_s: float,
    weights: str = "-",
) -> None:
    """Join the learner group once every rank has come to this call; to be made when the model is loaded.

    Args:
        store: the same for all ranks.
        timeout_s: of every collective afterwards: a rank that is gone shows as an error after it at the latest.
        start_timeout_s: how long the ranks wait for each other here. They have started and loaded their models apart.
        weights: fingerprint of the model that this rank has loaded.

    Raises:
        FlowGrpoError: ranks that did not come in time; names them.
        ConfigError: a rank has loaded other weights: their gradients would be added all the same.
    """
    keys = [f"loaded/{other}" for other in range(world_size)]
    store.set(keys[rank], weights)
    try:
        store.wait(keys, timedelta(seconds=start_timeout_s))
    except RuntimeError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        raise FlowGrpoError(f"learner rank {', '.join(missing)} did not start within {start_timeout_s:g} s "
                            "(pools.start_timeout_s)") from error
    loaded = [store.get(key) for key in keys]
    if other := [str(r) for r, value in enumerate(loaded) if value != loaded[0]]:
        raise ConfigError(f"learner rank {', '.join(other)} loaded other model weights than rank 0: set model.revision to "
                          "a commit of the hub model, or put the same folder on every node")
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group(devices.backend_of(device), store=store, rank=rank, world_size=world_size, timeout=timeout)


def choose_sharding(sharding: str, policy: Policy, world_size: int, *, colocated: bool = False) -> str:
    """Resolve `auto`, once for all ranks: by the least free memory of any (a collective on GPUs).

    `none` on CPU, on one rank, where the base takes at most half of the memory, and where the ranks also sample.

    Raises:
        ConfigError: colocated ranks have no memory for the training state of the adapter beside the model.
    """
    free = devices.free_memory_bytes(policy.device)
    if free is not None and (colocated or sharding == "auto"):
        free = int(reduce_min(torch.tensor(free, device=policy.device), world_size))
    if colocated:
        _check_fits(policy, free)
        return "none"
    if sharding != "auto":
        return sharding
    size = _bytes(policy, trained=False)
    return "none" if world_size == 1 or free is None or size <= (free + size) // 2 else "full"


def _check_fits(policy: Policy, free: int | None) -> None:
    """Gradients, AdamW's two moments and the EMA are each as large as the adapter, which is there already."""
    state = 4 * _bytes(policy, trained=True)
    if free is not None and state > free:
        raise ConfigError(
            f"pools.placement colocated keeps the base on every rank: {_bytes(policy, trained=False) / GIB:.1f} GiB, and "
            f"beside it, the text encoders and the VAE a rank has {free / GIB:.1f} GiB left for the training state of "
            f"the adapter, which takes {state / GIB:.1f} GiB before any activation. Use pools.placement: split with "
            "train.sharding: full, model.offload_encoders: true, or a smaller lora.rank")


def _bytes(policy: Policy, *, trained: bool) -> int:
    return sum(p.numel() * p.element_size() for module in policy.modules.values() for p in module.parameters()
               if trained == p.requires_grad)


def _hybrid_mesh(kind: str, world_size: int, shard_size: int, timeout_s: float) -> DeviceMesh:
    """[replicas, shards], whose groups have the collectives' deadline: torch would give them half an hour."""
    ranks, timeout = torch.arange(world_size).view(-1, shard_size), timedelta(seconds=timeout_s)
    own = []
    for members in (ranks.T.tolist(), ranks.tolist()):  # every rank takes part in making every group
        groups = [dist.new_group(group, timeout=timeout) for group in members]
        own.append(next(group for group, of in zip(groups, members, strict=True) if dist.get_rank() in of))
    return DeviceMesh.from_group(own, kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def shard(policy: Policy, sharding: str, shard_size: int | None, world_size: int, timeout_s: float) -> None:
    """Shard the policy's modules in place (nothing to do for `none`). `timeout_s`: of a collective."""
    if sharding == "none":
        return
    kind = policy.device.type
    if sharding == "hybrid":
        mesh = _hybrid_mesh(kind, world_size, shard_size or world_size, timeout_s)
    else:
        mesh = init_device_mesh(kind, (world_size,), mesh_dim_names=("shard",))
    for module in policy.modules.values():
        for block in [m for m in module.modules() if type(m).__name__ in policy.blocks]:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank (a collective where it is sharded)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's gradient, which has been made."""
    assert parameter.grad is not None
    return parameter.grad


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
            gradient(p).mul_(world_size)
        return
    flat = torch.cat([gradient(p).reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    offset = 0
    for p in parameters:
        gradient(p).copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def reduce_sum(values: torch.Tensor, world_size: int) -> torch.Tensor:
    if world_size > 1:
        dist.all_reduce(values)
    return values


def reduce_max(values: torch.Tensor, world_size: int) -> torch.Tensor:
    if world_size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def reduce_min(values: torch.Tensor, world_size: int) -> torch.Tensor:
    if world_size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
    return values
