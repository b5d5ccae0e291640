"""Two learner ranks against one: the same shards give the same gradients, however the model is sharded.

One pair of processes over gloo works through all cases; the tests look at what it has left in files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.multiprocessing as multiprocessing
from torch.distributed.tensor import DTensor

from flowgrpo_ray.config.load import Config, from_tree
from flowgrpo_ray.data.plan import plan_step
from flowgrpo_ray.data.trajectory import GroupScores
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.learning import parallel
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.slots import AdapterSlots
from flowgrpo_ray.rewards import get
from flowgrpo_ray.sampling.sampler import Sampler

WORLD = 2
KL = {"loss": {"beta": 0.5}, "data": {"negative_prompt": "mess"}}
SHARDINGS: dict[str, dict[str, Any]] = {
    "none": {"train": {"sharding": "none"}},
    "full": {"train": {"sharding": "full"}},
    "hybrid_2": {"train": {"sharding": "hybrid", "shard_size": 2}},
    "hybrid_1": {"train": {"sharding": "hybrid", "shard_size": 1}},
}
CASES: dict[str, dict[str, Any]] = {
    **SHARDINGS,
    "none_kl": {**SHARDINGS["none"], **KL},
    "full_kl": {**SHARDINGS["full"], **KL},
    "full_checkpointing": {"train": {"sharding": "full", "activation_checkpointing": True}, **KL},
    "full_bfloat16": {"train": {"sharding": "full", "ratio_tolerance": 1e-3}, "model": {"dtype": "bfloat16"}},
}


def configuration(**sections: dict[str, Any]) -> Config:
    """Three shards, so that two ranks have one to fill up with; a window of its own for every group."""
    sampling = {"group_size": 3, "groups_per_step": 3, "micro_batch": 3, "window": {"size": 2, "range": [0, 4]}}
    if "data" in sections:
        sampling["guidance_scale"] = 2.0
    return reference.configuration(
        sampling=sampling, pools={"learner": {"replicas": WORLD}}, advantage={"baseline": "history"}, **sections)


def masked(scores: dict[int, GroupScores]) -> dict[int, GroupScores]:
    """One sample of group 0 and all of group 1 without a score."""
    masks = {0: [True, False, True], 1: [False] * 3, 2: [True] * 3}
    return {group: GroupScores(s.rewards, np.array(masks[group])) for group, s in scores.items()}


def sampled(config: Config, step: int) -> tuple[Any, reference.StepData, dict[str, np.ndarray]]:
    """(plan, data, adapter) of a step, sampled in this process."""
    policy, _ = reference.load(config)
    adapter, slots = reference.perturbed(policy), AdapterSlots(policy)
    slots.load("policy", step, adapter)
    plan = plan_step(config, reference.RECORDS, step)
    data = reference.sample_step(config, plan, Sampler(policy, config, slots), {reference.JPEG: get(reference.JPEG)})
    return plan, dataclasses.replace(data, scores=masked(data.scores)), adapter


def one_step(learner: Learner, plan: Any, data: reference.StepData, rank: int, world_size: int) -> dict[str, Any]:
    """Metrics of the step, and the gradients that the optimizer was given, whole."""
    gradients: dict[str, np.ndarray] = {}

    def keep(*_: Any) -> None:
        gradients.update({key: parallel.whole(p.grad).numpy().copy() for key, p in learner.parameters.items()})

    hook = learner.optimizer.register_step_pre_hook(keep)
    updates = reference.learn_step(learner, plan, data, rank=rank, world_size=world_size)
    hook.remove()
    return {"updates": updates, "gradients": gradients}


def build(config: Config, adapter: dict[str, np.ndarray], rank: int = 0, world_size: int = 1) -> Learner:
    policy, _ = reference.load(config, parts="learner")
    lora.write_state(policy, adapter)
    return Learner(policy, config, run_id=reference.RUN_ID, rank=rank, world_size=world_size)


def share(learner: Learner) -> tuple[bool, float]:
    """Whether parameters are distributed, and the share of them that this rank holds."""
    tensors = [p for module in learner.policy.modules.values() for p in module.parameters()]
    here = [p.to_local() if isinstance(p, DTensor) else p for p in tensors]
    return isinstance(tensors[0], DTensor), sum(p.numel() for p in here) / sum(p.numel() for p in tensors)


def work(rank: int, folder: str) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    parallel.join(rank, WORLD, torch.distributed.FileStore(f"{folder}/meeting", WORLD), torch.device("cpu"),
                  timeout_s=120, start_timeout_s=120)
    jobs = torch.load(Path(folder, "jobs.pt"), weights_only=False)
    out = {}
    for name, (tree, plan, data, adapter) in jobs.items():
        learner = build(from_tree(tree), adapter, rank, WORLD)
        info, exported, _ = learner.export(0)
        out[name] = {"sharding": learner.sharding, "share": share(learner), "info": info, "exported": exported,
                     **one_step(learner, plan, data, rank, WORLD)}
        out[name] |= {"adapter": learner.adapter(), "ema": learner.ema_adapter()}
    out["resume"] = resume(rank, jobs["full"], torch.load(Path(folder, "later.pt"), weights_only=False))
    torch.save(out, Path(folder, f"rank_{rank}.pt"))
    torch.distributed.destroy_process_group()


def resume(rank: int, job: tuple, later: tuple) -> dict[str, Any]:
    """Two steps at one go, and two with a new learner in between, sharded."""
    tree, plan, data, adapter = job
    config = from_tree(tree)
    config.train.ratio_tolerance = 1e3  # the second step was not sampled under the weights of the first
    first = build(config, adapter, rank, WORLD)
    one_step(first, plan, data, rank, WORLD)
    state = first.state()
    second = build(config, adapter, rank, WORLD)
    second.load_state(*state)
    return {"loaded": second.state(), "saved": state,
            "through": (one_step(first, *later, rank, WORLD), first.state()),
            "resumed": (one_step(second, *later, rank, WORLD), second.state())}


@pytest.fixture(scope="module")
def jobs() -> dict[str, tuple]:
    """(configuration tree, plan, data, adapter) by case; cases that sample alike share their data."""
    made, out = {}, {}
    for name, sections in CASES.items():
        config = configuration(**sections)
        key = (config.model.dtype, config.sampling.guidance_scale)
        if key not in made:
            made[key] = sampled(config, 0)
        out[name] = (config.model_dump(mode="json"), *made[key])
    return out


@pytest.fixture(scope="module")
def ranks(jobs, tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(jobs, folder / "jobs.pt")
    torch.save(sampled(configuration(**CASES["full"]), 1)[:2], folder / "later.pt")
    multiprocessing.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone(jobs) -> dict[str, dict[str, Any]]:
    """The same shards in one process without sharding, by case."""
    found = {}
    for name in ("none", "none_kl", "full_bfloat16"):
        tree, plan, data, adapter = jobs[name]
        config = from_tree(tree)
        config.train.sharding = "none"
        learner = build(config, adapter)
        found[name] = {**one_step(learner, plan, data, 0, 1), "adapter": learner.adapter()}
    plain = {name: "none_kl" if sections.get("loss") else "none" for name, sections in CASES.items()}
    return {name: found.get(name) or found[plain[name]] for name in CASES}


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(ranks, alone, case):
    expected = alone[case]["gradients"]
    silent = {key.rsplit(".lora", 1)[0] for key, value in expected.items() if not value.any()}
    # The last block's text queries lead nowhere: that block hands on image tokens only.
    assert silent == {"transformer.transformer_blocks.3.attn.add_q_proj"} and len(expected) == 62
    for rank in ranks:
        found = rank[case]["gradients"]
        assert found.keys() == expected.keys()
        assert max(relative(found[key], expected[key]) for key in expected) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_one_process_on_both_ranks(ranks, alone, case):
    expected = alone[case]["updates"][0]
    for rank in ranks:
        found = rank[case]["updates"][0]
        assert found.keys() == expected.keys()
        for key in found.keys() - {"seconds", "cpu_seconds"}:
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-9), key
    assert expected["valid_samples"] == 5 and expected["masked_samples"] == 4


@pytest.mark.parametrize("case", CASES)
def test_the_on_policy_ratio_is_one_on_every_rank(ranks, case):
    limit = 1e-3 if case == "full_bfloat16" else 0.0
    assert [rank[case]["updates"][0]["first_update_log_ratio_max"] <= limit for rank in ranks] == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_the_gathered_adapter_is_whole_and_the_same_on_both_ranks(ranks, jobs, case):
    start = jobs[case][3]
    for kind in ("adapter", "ema"):
        one, other = (rank[case][kind] for rank in ranks)
        assert one.keys() == other.keys() == start.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)
        assert {key: (value.shape, value.dtype) for key, value in one.items()} == {
            key: (value.shape, np.dtype(np.float32)) for key, value in start.items()}
        assert all((one[key] != start[key]).any() for key in one)
    assert ranks[0][case]["info"] == ranks[1][case]["info"]
    assert ranks[0][case]["info"].digest == lora.digest(start)
    assert lora.digest(ranks[0][case]["exported"]) == lora.digest(start) and ranks[1][case]["exported"] is None


@pytest.mark.parametrize("case", SHARDINGS)
def test_the_updated_adapter_is_that_of_one_process(ranks, alone, jobs, case):
    """Not bit for bit: sums are rounded in another order, and Adam divides gradients by their own size."""
    for key, expected in alone[case]["adapter"].items():
        moved = np.abs(expected - jobs[case][3][key]).max()
        assert np.abs(ranks[0][case]["adapter"][key] - expected).max() <= 0.01 * moved


def test_the_model_really_is_sharded(ranks):
    for rank in ranks:
        for name in CASES:
            distributed, part = rank[name]["share"]
            assert rank[name]["sharding"] == name.split("_")[0]
            assert distributed == (not name.startswith("none"))
            assert part == pytest.approx(1.0 if name.startswith("none") or name == "hybrid_1" else 0.5, abs=0.01)


def test_a_sharded_state_is_loaded_bit_for_bit(ranks):
    for rank in ranks:
        assert_states_equal(rank["resume"]["loaded"], rank["resume"]["saved"])
        tensors, counters = rank["resume"]["saved"]
        assert len(tensors["optimizer"]) == 3 * len(tensors["adapter"])
        assert counters["updates"] == 1 and counters["history"]
    assert_states_equal(ranks[0]["resume"]["saved"], ranks[1]["resume"]["saved"])


def test_a_sharded_learner_resumes_as_if_never_stopped(ranks):
    for rank in ranks:
        (through, state), (resumed, resumed_state) = rank["resume"]["through"], rank["resume"]["resumed"]
        assert_states_equal(state, resumed_state)
        assert state[1]["updates"] == 2
        for key in through["gradients"]:
            assert through["gradients"][key].tobytes() == resumed["gradients"][key].tobytes()
        for key in through["updates"][0].keys() - {"seconds", "cpu_seconds"}:
            assert through["updates"][0][key] == resumed["updates"][0][key], key


@pytest.mark.parametrize(("world_size", "free", "expected"), [(2, None, "none"), (2, 0, "full"), (1, 0, "none"),
                                                              (2, 10**12, "none")])
def test_auto_shards_where_the_base_would_take_more_than_half_of_the_memory(
    small_policy, monkeypatch, world_size, free, expected
):
    """`free` is what the GPU has left beside the base; None on CPU."""
    monkeypatch.setattr(parallel.devices, "free_memory_bytes", lambda device: free)
    monkeypatch.setattr(parallel, "reduce_min", lambda values, world_size: values)
    assert parallel.choose_sharding("auto", small_policy, world_size) == expected
    assert parallel.choose_sharding("hybrid", small_policy, world_size) == "hybrid"


def test_colocated_ranks_keep_the_base_or_say_what_does_not_fit(small_policy, monkeypatch):
    """A sampler cannot work on shards: half of the memory is no reason to shard there."""
    state = 4 * sum(p.numel() * 4 for p in lora.parameters(small_policy).values())
    monkeypatch.setattr(parallel, "reduce_min", lambda values, world_size: values)
    for sharding in ("auto", "none"):
        monkeypatch.setattr(parallel.devices, "free_memory_bytes", lambda device: state)
        assert parallel.choose_sharding(sharding, small_policy, 2, colocated=True) == "none"
        monkeypatch.setattr(parallel.devices, "free_memory_bytes", lambda device: state - 1)
        with pytest.raises(ConfigError, match="training state of the adapter, .*pools.placement: split"):
            parallel.choose_sharding(sharding, small_policy, 2, colocated=True)
    monkeypatch.setattr(parallel.devices, "free_memory_bytes", lambda device: None)
    assert parallel.choose_sharding("auto", small_policy, 2, colocated=True) == "none"


@pytest.fixture(scope="module")
def small_policy() -> Any:
    return reference.load(reference.configuration(), parts="learner")[0]


def assert_states_equal(one: tuple, other: tuple) -> None:
    assert one[1] == other[1]
    for name in ("adapter", "ema", "optimizer"):
        assert one[0][name].keys() == other[0][name].keys()
        for key, value in one[0][name].items():
            assert value.tobytes() == other[0][name][key].tobytes(), (name, key)
