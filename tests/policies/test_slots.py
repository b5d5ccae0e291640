"""Adapter versions in the model: each sync is answered with what is read back, and nothing is ever approximated."""

from __future__ import annotations

import numpy as np
import pytest

from flowgrpo_ray.config.schema import LoraSection
from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.errors import SyncError
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.slots import AdapterSlots, changed_tensors

TENSORS = 62


@pytest.fixture(scope="module")
def policy(fresh) -> Policy:
    policy = fresh("builtin:tiny", parts="learner", use_t5=False)
    lora.attach(policy, LoraSection(rank=4), 0)
    return policy


@pytest.fixture
def slots(policy) -> AdapterSlots:
    return AdapterSlots(policy)


def adapter(policy: Policy, seed: int) -> Arrays:
    generator = np.random.default_rng(seed)
    return {key: generator.normal(0, 0.1, p.shape).astype(np.float32) for key, p in lora.parameters(policy).items()}


def with_changes(arrays: Arrays, count: int) -> Arrays:
    """The last element of the first `count` tensors is another."""
    out = {key: value.copy() for key, value in arrays.items()}
    for key in list(out)[:count]:
        out[key].flat[-1] += 1
    return out


def test_a_load_is_proven_by_what_is_read_back(policy, slots):
    arrays = adapter(policy, 1)
    reply = slots.load("policy", 5, arrays)
    assert (reply.slot, reply.version, reply.previous) == ("policy", 5, -1)
    assert (reply.bound, reply.changed) == (TENSORS, -1)
    assert reply.digest == lora.digest(arrays) == lora.digest(lora.read_state(policy))
    assert slots.version("policy") == 5


def test_the_digest_is_that_of_the_model_and_not_of_the_message(policy, slots, monkeypatch):
    """A write that does not arrive shows in the answer."""
    arrays = adapter(policy, 1)
    slots.load("policy", 0, arrays)
    monkeypatch.setattr(lora, "write_state", lambda *_: (TENSORS, TENSORS))
    reply = slots.load("policy", 1, adapter(policy, 2))
    assert reply.digest == lora.digest(arrays) and reply.changed == 0


@pytest.mark.parametrize("count", [0, 1, 7, TENSORS])
def test_changed_tensors_are_counted_against_the_version_before(policy, slots, count):
    arrays = adapter(policy, 1)
    slots.load("policy", 0, arrays)
    reply = slots.load("policy", 1, with_changes(arrays, count))
    assert (reply.previous, reply.changed, reply.bound) == (0, count, TENSORS)


def test_changed_counts_are_of_the_slot_itself(policy, slots):
    """The slots share the model; a load of one is not compared with what the other had put there."""
    arrays = adapter(policy, 1)
    slots.load("policy", 3, arrays)
    assert slots.load("ema", 3, adapter(policy, 2)).changed == -1
    reply = slots.load("policy", 4, with_changes(arrays, 2))
    assert (reply.previous, reply.changed) == (3, 2)


def test_signs_of_zero_and_nan_bits_are_compared():
    one = {"a": np.array([0.0, np.nan], np.float32), "b": np.ones(2, np.float32)}
    assert changed_tensors(one, {key: value.copy() for key, value in one.items()}) == 0
    assert changed_tensors(one, {**one, "a": np.array([-0.0, np.nan], np.float32)}) == 1


def test_a_bind_puts_the_named_version_into_the_model(policy, slots):
    raw, ema = adapter(policy, 1), adapter(policy, 2)
    slots.load("policy", 2, raw)
    slots.load("ema", 2, ema)
    assert lora.digest(lora.read_state(policy)) == lora.digest(ema)
    for slot, arrays in (("policy", raw), ("ema", ema), ("ema", ema), ("policy", raw)):
        assert slots.bind(slot, 2) == lora.digest(arrays) == lora.digest(lora.read_state(policy))


@pytest.mark.parametrize(
    ("slot", "version", "message"),
    [("policy", 3, "names policy version 3, and this actor holds version 2"),
     ("policy", 1, "names policy version 1, and this actor holds version 2"),
     ("ema", 2, "names ema version 2, and this actor holds nothing")])
def test_what_is_not_held_is_refused(policy, slots, slot, version, message):
    arrays = adapter(policy, 1)
    slots.load("policy", 2, arrays)
    with pytest.raises(SyncError, match=message):
        slots.bind(slot, version)
    assert slots.bind("policy", 2) == lora.digest(arrays) == lora.digest(lora.read_state(policy))


def test_a_newer_version_takes_the_place_of_the_older(policy, slots):
    slots.load("policy", 2, adapter(policy, 1))
    slots.load("policy", 3, adapter(policy, 2))
    with pytest.raises(SyncError, match="holds version 3"):
        slots.bind("policy", 2)


def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(policy, slots):
    arrays = adapter(policy, 1)
    slots.load("policy", 2, arrays)
    other = adapter(policy, 2)
    other.pop(next(iter(other)))
    with pytest.raises(SyncError, match="1 weights of 62 are missing"):
        slots.load("policy", 3, other)
    assert slots.version("policy") == 2
    assert slots.bind("policy", 2) == lora.digest(arrays) == lora.digest(lora.read_state(policy))


def test_what_is_held_is_a_copy(policy, slots):
    """Neither the caller's arrays nor the live parameters may reach into a held version."""
    arrays = adapter(policy, 1)
    expected = lora.digest(arrays)
    slots.load("policy", 0, arrays)
    for value in arrays.values():
        value += 1
    slots.load("ema", 0, adapter(policy, 2))
    assert slots.bind("policy", 0) == expected == lora.digest(lora.read_state(policy))


def test_trained_parameters_are_adopted_with_the_same_proof(policy, slots):
    """As a colocated learner has it: no transfer, and the answer that a transfer would give."""
    arrays = adapter(policy, 1)
    lora.write_state(policy, arrays)
    first = slots.adopt("policy", 0)
    assert (first.bound, first.changed, first.previous, first.digest) == (TENSORS, -1, -1, lora.digest(arrays))
    trained = with_changes(arrays, 5)
    lora.write_state(policy, trained)
    second = slots.adopt("policy", 1)
    assert (second.bound, second.changed, second.previous, second.digest) == (TENSORS, 5, 0, lora.digest(trained))
    other = AdapterSlots(policy)
    other.load("policy", 0, arrays)
    assert other.load("policy", 1, trained) == second


def test_an_evaluation_in_between_leaves_the_trained_weights(policy, slots):
    arrays = adapter(policy, 1)
    lora.write_state(policy, arrays)
    slots.adopt("policy", 1)
    slots.load("ema", 1, adapter(policy, 2))
    with pytest.raises(SyncError, match="'policy' cannot be adopted while 'ema' is bound"):
        slots.adopt("policy", 2)
    slots.bind("policy", 1)
    assert lora.digest(lora.read_state(policy)) == lora.digest(arrays)
    assert slots.adopt("policy", 2).changed == 0
