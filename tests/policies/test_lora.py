"""The adapter in the model: initialisation, state in and out, the digest, the reference, dtypes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from policy_steps import conditioning, noise
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from flowgrpo_ray.config.schema import LoraSection
from flowgrpo_ray.errors import ConfigError, SyncError
from flowgrpo_ray.policies import lora

SMALL = LoraSection(rank=4)
KINDS = ["sd3_t5", "flux_dev"]


def other_state(policy, seed: int = 1) -> dict[str, np.ndarray]:
    """A state that no weight shares with the initial one."""
    rng = np.random.default_rng(seed)
    return {key: rng.normal(0, 0.2, param.shape).astype(np.float32) for key, param in lora.parameters(policy).items()}


def reached(policy) -> dict[str, torch.nn.Parameter]:
    """Weights that the image depends on: SD3's last block drops its text stream, so nothing reads its text queries."""
    dropped = "transformer_blocks.1.attn.add_q_proj"
    return {key: param for key, param in lora.parameters(policy).items()
            if policy.family != "sd3" or dropped not in key}


@pytest.fixture
def policy(fresh):
    policy = fresh("sd3_t5", parts="learner")
    lora.attach(policy, SMALL, seed=3)
    return policy


@pytest.fixture(scope="module")
def given(shared):
    """(conditioning, noise) of the SD3 model."""
    return conditioning(shared("sd3_t5")), noise(shared("sd3_t5"))


@pytest.mark.parametrize(("kind", "rank"), [("sd3_t5", 32), ("flux_dev", 64)])
def test_the_familys_defaults(fresh, kind, rank):
    policy = fresh(kind, parts="learner")
    settings = lora.attach(policy, LoraSection(), seed=0)
    assert settings == lora.LoraSettings(rank, 2.0 * rank, type(policy).default_targets)
    live = lora.parameters(policy)
    assert list(live) == sorted(live)
    assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in live
    trained = [param for module in policy.modules.values() for param in module.parameters() if param.requires_grad]
    assert {id(param) for param in trained} == {id(param) for param in live.values()}
    assert all(param.dtype == torch.float32 for param in live.values())


def test_sd3_layers_are_the_attention_projections_of_all_blocks(policy):
    layers = {key.split(".", 1)[1].rsplit(".lora_", 1)[0] for key in lora.parameters(policy)}
    inputs = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    expected = {f"transformer_blocks.{block}.attn.{name}" for block in (0, 1) for name in inputs}
    # The last block keeps no text stream, so it has no output projection for it.
    assert layers == expected | {"transformer_blocks.0.attn.to_add_out"}


def test_flux_layers_are_attention_and_feed_forward_inside_the_blocks_only(fresh):
    policy = fresh("flux_dev", parts="learner")
    lora.attach(policy, SMALL, seed=0)
    layers = {key.split(".", 1)[1].rsplit(".lora_", 1)[0] for key in lora.parameters(policy)}
    attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    double = [*(f"attn.{name}" for name in attention),
              *(f"{ff}.net.{name}" for ff in ("ff", "ff_context") for name in ("0.proj", "2"))]
    single = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"]
    assert layers == {*(f"transformer_blocks.0.{name}" for name in double),
                      *(f"single_transformer_blocks.{block}.{name}" for block in (0, 1) for name in single)}
    assert isinstance(policy.modules["transformer"].proj_out, torch.nn.Linear)  # the top-level one is left alone


@pytest.mark.parametrize(("targets", "message"), [
    (["attn.to_q", "attn.to_kk"], r"ends in 'attn.to_kk'; did you mean attn.to_k\?"),
    (["proj_out"], "ends in 'proj_out'"),  # exists in SD3, but outside the blocks
    (["o_q"], "ends in 'o_q'"),  # an ending starts at a dot
    ([], "lora.targets is empty")])
def test_targets_that_match_nothing_are_errors(fresh, targets, message):
    policy = fresh("sd3_t5", parts="learner")
    with pytest.raises(ConfigError, match=message):
        lora.attach(policy, LoraSection(targets=targets), seed=0)
    assert not lora.parameters(policy)


def test_a_second_adapter_is_refused(policy):
    with pytest.raises(RuntimeError, match="already"):
        lora.attach(policy, SMALL, seed=3)


def test_initialisation_is_gaussian_and_depends_on_the_seed_alone(fresh, policy):
    state = lora.read_state(policy)
    for key, array in state.items():
        if ".lora_B." in key:
            assert not array.any()
        else:
            assert abs(array.std() * 4 - 1) < 0.2 and abs(array.mean() * 4) < 0.35  # N(0, 1/r^2), r = 4
    again, half, other = fresh("sd3_t5"), fresh("sd3_t5", dtype="bfloat16"), fresh("sd3_t5")
    torch.manual_seed(99)
    before = torch.get_rng_state()
    lora.attach(again, SMALL, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    lora.attach(half, SMALL, seed=3)
    lora.attach(other, SMALL, seed=4)
    digest = lora.digest(state)
    assert lora.digest(lora.read_state(again)) == digest == lora.digest(lora.read_state(half))
    assert lora.digest(lora.read_state(other)) != digest
    columns = [array[:, :8].tobytes() for key, array in state.items() if ".lora_A." in key]
    assert len(set(columns)) == len(columns)  # no two layers share their draw


def test_another_process_has_the_same_digest(folders, policy):
    script = f"""
import torch
from flowgrpo_ray.config.schema import LoraSection, ModelConfig
from flowgrpo_ray.policies import load_policy, lora
torch.rand(7)
policy = load_policy(ModelConfig(path={folders("sd3_t5")!r}), parts="learner")
lora.attach(policy, LoraSection(rank=4), seed=3)
print(lora.digest(lora.read_state(policy)))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == [lora.digest(lora.read_state(policy))]


def test_the_digest_sees_key_shape_dtype_and_every_bit_and_no_order():
    base = {"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float32)}
    flipped = {**base, "a": base["a"].copy()}
    flipped["a"][1, 2] = -0.0
    variants = [
        base, {"c": base["a"], "b": base["b"]}, {**base, "a": base["a"].reshape(3, 2)}, flipped,
        {**base, "a": base["a"].view(np.int32)}, {"a": base["a"]}]
    assert len({lora.digest(arrays) for arrays in variants}) == len(variants)
    assert lora.digest(dict(reversed(base.items()))) == lora.digest(base)
    assert lora.digest({**base, "a": np.asfortranarray(base["a"])}) == lora.digest(base)


def test_state_goes_in_and_comes_out_in_place(policy):
    live = lora.parameters(policy)
    addresses = {key: param.data_ptr() for key, param in live.items()}
    start, state = lora.read_state(policy), other_state(policy)
    for array in state.values():
        array.setflags(write=False)  # as arrays from the object store are
    assert lora.write_state(policy, state) == (len(live), len(live))
    assert lora.write_state(policy, state) == (len(live), 0)
    read = lora.read_state(policy)
    assert lora.digest(read) == lora.digest(state) and list(read) == sorted(state)
    one = {key: array.copy() for key, array in state.items()}
    first = next(iter(one))
    one[first][0, 0] = np.nextafter(one[first][0, 0], np.float32(9))
    assert lora.write_state(policy, one) == (len(live), 1)
    assert {key: param.data_ptr() for key, param in lora.parameters(policy).items()} == addresses
    read[first][:] = 7  # a copy, not a view of the parameter
    assert lora.digest(lora.read_state(policy)) == lora.digest(one) != lora.digest(start)


def test_a_zero_that_changes_its_sign_has_changed(policy):
    state = lora.read_state(policy)
    key = next(key for key in state if ".lora_B." in key)
    assert lora.write_state(policy, {**state, key: -state[key]}) == (len(state), 1)


def test_a_state_that_does_not_fit_is_refused_as_a_whole(policy):
    state, before = other_state(policy), lora.digest(lora.read_state(policy))
    first, *_, last = state
    wrong = [
        {key: array for key, array in state.items() if key != last},
        {**state, "transformer.extra.lora_A.weight": np.zeros((4, 4), np.float32)},
        {**state, last: state[last].T.copy()},
        {**state, last: state[last].astype(np.float64)}]
    for arrays, message in zip(wrong, ("missing", "unknown", "the policy holds", "float64"), strict=True):
        with pytest.raises(SyncError, match=message):
            lora.write_state(policy, arrays)
        assert lora.digest(lora.read_state(policy)) == before


def test_disabled_is_the_base_model_and_may_stand_before_a_backward(policy, shared, given):
    conditions, x = given
    lora.write_state(policy, other_state(policy))
    with torch.no_grad():
        base = shared("sd3_t5").velocity(x, 0.5, conditions, 1.0)
    adapted = policy.velocity(x, 0.5, conditions, 1.0)
    assert (adapted - base).abs().max() > 1e-3
    with lora.disabled(policy), torch.no_grad():
        assert torch.equal(policy.velocity(x, 0.5, conditions, 1.0), base)
        with lora.disabled(policy):  # nesting leaves it off
            pass
        assert torch.equal(policy.velocity(x, 0.5, conditions, 1.0), base)
    adapted.square().mean().backward()
    assert all(param.requires_grad for param in lora.parameters(policy).values())
    assert all(param.grad.abs().max() > 0 for param in reached(policy).values())
    with pytest.raises(KeyError), lora.disabled(policy):
        raise KeyError
    with torch.no_grad():
        assert torch.equal(policy.velocity(x, 0.5, conditions, 1.0), adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_is_the_identity(fresh, shared, kind):
    policy, base = fresh(kind, parts="learner"), shared(kind)
    lora.attach(policy, SMALL, seed=0)
    conditions, x = conditioning(base), noise(base)
    with torch.no_grad():
        assert torch.equal(policy.velocity(x, 0.5, conditions, 1.0), base.velocity(x, 0.5, conditions, 1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_base_runs_forward_and_backward_with_a_float32_adapter(fresh, kind):
    policy = fresh(kind, dtype="bfloat16")
    lora.attach(policy, SMALL, seed=0)
    lora.write_state(policy, other_state(policy))
    policy.velocity(noise(policy), 0.5, conditioning(policy, negatives=["", ""]), 2.0).square().mean().backward()
    dtypes = {param.dtype for name, param in policy.modules["transformer"].named_parameters() if "lora_" not in name}
    assert dtypes == {torch.bfloat16}
    for param in lora.parameters(policy).values():
        assert param.dtype == param.grad.dtype == torch.float32
        assert param.grad.isfinite().all()
    assert all(param.grad.abs().max() > 0 for param in reached(policy).values())


def test_the_adapter_computes_in_float32_on_a_bfloat16_base(fresh):
    policy = fresh("sd3_t5", parts="learner", dtype="bfloat16")
    lora.attach(policy, LoraSection(rank=4, alpha=6), seed=0)
    state = other_state(policy)
    lora.write_state(policy, state)
    layer = policy.modules["transformer"].transformer_blocks[0].attn.to_q
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    name = "transformer.transformer_blocks.0.attn.to_q.lora_{}.weight"
    a, b = (torch.from_numpy(state[name.format(side)]) for side in "AB")
    with torch.no_grad():
        by_rule = (layer.base_layer(x) + (x.float() @ a.T @ b.T) * (6 / 4)).bfloat16()
        rounded_weights = layer.base_layer(x) + (x @ a.bfloat16().T @ b.bfloat16().T) * (6 / 4)
        assert torch.equal(layer(x), by_rule) and not torch.equal(layer(x), rounded_weights)


def test_keys_are_the_same_under_activation_checkpointing(policy):
    keys = list(lora.parameters(policy))
    apply_activation_checkpointing(
        policy.modules["transformer"], check_fn=lambda module: type(module).__name__ in policy.blocks)
    assert any("_checkpoint_wrapped_module" in name for name, _ in policy.modules["transformer"].named_parameters())
    assert list(lora.parameters(policy)) == keys
