"""Ranks that do not come to the same place at the same time, or do not see the same: two real processes over gloo."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from flowgrpo_ray.errors import ConfigError, FlowGrpoError
from flowgrpo_ray.learning import parallel

WORLD, TIMEOUT_S, LATE_S = 2, 3.0, 6.0
CPU = torch.device("cpu")


class Block(nn.Linear):
    """What FSDP wraps."""


def policy() -> Any:
    network = nn.Sequential(Block(8, 8, bias=False)).requires_grad_(False)
    return SimpleNamespace(device=CPU, modules={"transformer": network}, blocks=("Block",))


def deadline_s(group: dist.ProcessGroup) -> float:
    return group._get_backend(CPU).options._timeout.total_seconds()


def work(rank: int, folder: str) -> None:
    """Rank 1 comes late, sees less free memory, and later stays away."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", WORLD)
    if rank == 1:
        time.sleep(LATE_S)
    parallel.join(rank, WORLD, store, CPU, timeout_s=TIMEOUT_S, start_timeout_s=120)
    out: dict[str, Any] = {"sum": float(parallel.reduce_sum(torch.ones(()), WORLD))}
    for name, free in (("alike", (10**9, 10**9)), ("apart", (10**9, 100))):
        parallel.devices.free_memory_bytes = lambda device, free=free: free[rank]
        out[name] = parallel.choose_sharding("auto", policy(), WORLD)
    hybrid = policy()
    parallel.shard(hybrid, "hybrid", 1, WORLD, TIMEOUT_S)
    mesh = hybrid.modules["transformer"][0].weight.device_mesh
    out["mesh"] = {name: (mesh.get_group(name).size(), deadline_s(mesh.get_group(name))) for name in mesh.mesh_dim_names}
    done = Path(folder, "done")
    if rank == 1:  # waits as one that hangs would
        while not done.exists():
            time.sleep(0.1)
    else:
        try:
            dist.all_reduce(torch.ones(()))
        except RuntimeError as error:
            out["error"] = str(error)
    torch.save(out, Path(folder, f"rank_{rank}.pt"))
    done.touch()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("apart")
    multiprocessing.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(WORLD)]


def test_a_rank_that_starts_later_than_a_collective_may_take_is_waited_for(ranks):
    assert [rank["sum"] for rank in ranks] == [WORLD, WORLD]


def test_afterwards_the_short_deadline_holds_in_every_group(ranks):
    assert f"{1000 * TIMEOUT_S:.0f}ms" in ranks[0]["error"]
    for rank in ranks:
        assert rank["mesh"] == {"replicate": (WORLD, TIMEOUT_S), "shard": (1, TIMEOUT_S)}


def test_ranks_that_see_different_memory_choose_one_sharding(ranks):
    assert [rank["alike"] for rank in ranks] == ["none", "none"]
    assert [rank["apart"] for rank in ranks] == ["full", "full"]


def test_a_rank_with_another_model_is_named(tmp_path):
    """A folder that differs between nodes, or a hub model that one of them fetched earlier."""
    store = dist.FileStore(f"{tmp_path}/meeting", 3)
    for rank, weights in ((0, "a"), (2, "b")):
        store.set(f"loaded/{rank}", weights)
    with pytest.raises(ConfigError, match="learner rank 2 loaded other model weights than rank 0: set model.revision"):
        parallel.join(1, 3, store, CPU, timeout_s=1, start_timeout_s=10, weights="a")


def test_a_rank_that_does_not_come_is_named(tmp_path):
    store = dist.FileStore(f"{tmp_path}/meeting", 3)
    store.set("loaded/1", "1")
    with pytest.raises(FlowGrpoError, match=r"learner rank 2 did not start within 0\.2 s \(pools.start_timeout_s\)"):
        parallel.join(0, 3, store, CPU, timeout_s=1, start_timeout_s=0.2)
