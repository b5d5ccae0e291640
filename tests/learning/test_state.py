"""A learner's state in a checkpoint: bit for bit there and back, and training goes on as if never stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from reference import JPEG, RECORDS, Reference, configuration

from flowgrpo_ray.errors import CheckpointError
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.learning.state import read_learner_state, write_learner_state
from flowgrpo_ray.policies import lora
from flowgrpo_ray.rewards import get
from flowgrpo_ray.run_dir import checkpoint

# Two prompts, so that every step meets them again; an EMA that has moved by then, and whose decay is still growing.
SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"updates_per_step": 2, "ema": {"every_updates": 1}}, "advantage": {"baseline": "history"}}
STEPS = 2


def start(**sections: dict[str, Any]) -> Reference:
    return Reference(configuration(**{**SECTIONS, **sections}), {JPEG: get(JPEG)})


def save(run: Reference, folder: Any) -> str:
    uri = checkpoint.step_dir(str(folder), 1)
    entries = write_learner_state(uri, *run.learner.state(), run.settings, type(run.policy))
    checkpoint.commit(uri, entries, {}, run_id="r", step=1, result_hash="h")
    return uri


def assert_same(one: tuple, other: tuple) -> None:
    """Two states of learners, tensors to the byte."""
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys() == {"adapter", "ema", "optimizer"}
    for name, tensors in one[0].items():
        assert tensors.keys() == other[0][name].keys()
        for key, value in tensors.items():
            found = other[0][name][key]
            assert (found.dtype, found.shape) == (value.dtype, value.shape), (name, key)
            assert found.tobytes() == value.tobytes(), (name, key)


@pytest.fixture(scope="module")
def through(tmp_path_factory) -> dict[str, Any]:
    """A run of two steps that was saved after the first and went on."""
    run = start()
    rows = [run.step(RECORDS[:2], 0)]
    middle, uri = run.learner.state(), save(run, tmp_path_factory.mktemp("run"))
    rows += [run.step(RECORDS[:2], step) for step in range(1, STEPS)]
    return {"run": run, "rows": rows, "middle": middle, "uri": uri, "end": run.learner.state()}


def test_what_is_read_is_what_was_written(through):
    assert_same(read_learner_state(through["uri"]), through["middle"])
    tensors, counters = through["middle"]
    assert counters["updates"] == 2 and [count for count, _, _ in counters["history"].values()] == [4, 4]
    assert len(tensors["optimizer"]) == 3 * len(tensors["adapter"]) == 3 * 62
    assert any((tensors["adapter"][key] != value).any() for key, value in tensors["ema"].items())


def test_four_updates_are_two_and_a_new_learner_and_two(through):
    run = start()
    run.learner.load_state(*read_learner_state(through["uri"]))
    assert_same(run.learner.state(), through["middle"])
    rows = [run.step(RECORDS[:2], step) for step in range(1, STEPS)]
    assert_same(run.learner.state(), through["end"])
    assert rows == through["rows"][1:]
    assert through["end"][1]["updates"] == 2 * STEPS
    changed = through["end"][0]["ema"]
    assert any((changed[key] != value).any() for key, value in through["middle"][0]["ema"].items())


def test_the_state_kept_when_a_step_begins_is_that_of_the_step_before(through):
    """Whatever of the step has happened: updates, EMA, statistics of the prompts."""
    run = start()
    run.learner.load_state(*read_learner_state(through["uri"]))
    begin = run.learner.begin_step
    run.learner.begin_step = lambda plan: begin(plan, keep=True)
    run.step(RECORDS[:2], 1)
    step, *kept = run.learner.finished
    assert step == 1
    assert_same(tuple(kept), through["middle"])
    assert_same(run.learner.state(), through["end"])
    begin(run.learner.plan)
    assert run.learner.finished is None


def test_the_reference_loop_goes_on_from_a_checkpoint(through):
    adapter, ema, rows = reference.train_reference(
        configuration(**SECTIONS), RECORDS[:2], STEPS, get(JPEG), start_step=1,
        state=read_learner_state(through["uri"]))
    assert lora.digest(adapter) == lora.digest(through["end"][0]["adapter"])
    assert lora.digest(ema) == lora.digest(through["end"][0]["ema"]) and rows == through["rows"][1:]


@pytest.mark.parametrize("lost", ["ema", "optimizer", "updates", "history"])
def test_each_part_of_the_state_matters(through, lost):
    """Without any one of them the run does not end where it should: the comparison above can fail."""
    tensors, counters = read_learner_state(through["uri"])
    if lost == "updates":
        counters["updates"] = 0
    elif lost == "history":
        counters["history"] = {}
    else:
        tensors[lost] = tensors["adapter"] if lost == "ema" else {}
    run = start()
    run.learner.load_state(tensors, counters)
    run.step(RECORDS[:2], 1)
    with pytest.raises(AssertionError):
        assert_same(run.learner.state(), through["end"])


def test_a_state_replaces_all_that_a_learner_had(through):
    """Also the moments: a state from before the first update has none."""
    learner = through["run"].learner
    policy, config = learner.policy, learner.config
    after = learner.state()
    lora.write_state(policy, through["middle"][0]["adapter"])
    fresh = Learner(policy, config, run_id="r").state()
    assert fresh[0]["optimizer"] == {} and fresh[1]["updates"] == 0
    learner.load_state(*fresh)
    assert_same(learner.state(), fresh)
    learner.load_state(*after)
    assert_same(learner.state(), after)


def test_the_adapters_are_files_that_load_with_their_alpha(through, tmp_path):
    run = through["run"]
    for name in ("adapter", "ema"):
        arrays, settings = lora.load_adapter(f"{through['uri']}/{name}")
        assert lora.digest(arrays) == lora.digest(through["middle"][0][name])
        assert (settings.rank, settings.alpha) == (run.settings.rank, run.settings.alpha) == (4, 8.0)


def test_without_ema_the_state_holds_the_adapter_twice(tmp_path):
    run = start(train={"ema": {"enabled": False}}, advantage={})
    lora.write_state(run.policy, reference.perturbed(run.policy))
    tensors, counters = run.learner.state()
    assert lora.digest(tensors["ema"]) == lora.digest(tensors["adapter"]) and counters["history"] is None
    uri = save(run, tmp_path)
    lora.write_state(run.policy, {key: np.zeros_like(value) for key, value in tensors["adapter"].items()})
    run.learner.load_state(*read_learner_state(uri))
    assert_same(run.learner.state(), (tensors, counters))


def test_a_damaged_file_is_refused(through, tmp_path):
    run = through["run"]
    uri = save(run, tmp_path)
    file = tmp_path / "checkpoints" / "step_1" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="optimizer.safetensors is not what was written"):
        read_learner_state(uri)


def test_the_state_of_another_adapter_is_refused_and_changes_nothing(through):
    tensors, counters = through["middle"]
    other = start(lora={"rank": 1})
    before = other.learner.state()
    with pytest.raises(CheckpointError, match=r"lora_A.weight is \(4, 128\), and the model needs \(1, 128\)"):
        other.learner.load_state(tensors, counters)
    assert_same(other.learner.state(), before)
    short = dict(list(tensors["adapter"].items())[1:])
    with pytest.raises(CheckpointError, match="add_k_proj.lora_A.* one side only"):
        through["run"].learner.load_state({**tensors, "adapter": short}, counters)
