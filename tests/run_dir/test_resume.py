"""What may change when a run resumes, and what a rejection says."""

from __future__ import annotations

import json

import pytest

from flowgrpo_ray import storage
from flowgrpo_ray.config.load import Config, from_tree, load, to_yaml
from flowgrpo_ray.config.schema import EVALUATION, INFRASTRUCTURE, RESULT
from flowgrpo_ray.errors import ConfigError, ResumeError
from flowgrpo_ray.run_dir import checkpoint, resume
from flowgrpo_ray.run_dir.recorder import Recorder

OCR = "rewards.ocr.weight=1"
INPUTS = {"data.train_prompts": {"": "sha256:aaaa"}, "model.path": {"unet/config.json": "sha256:b", "x.json": "sha256:c"}}


@pytest.fixture
def saved(tmp_path):
    """A run with a checkpoint of step 2, made under some overrides."""
    def save(*overrides: str, inputs=INPUTS, state=None) -> checkpoint.CheckpointInfo:
        config = load(None, [OCR, f"run.dir={tmp_path}", "run.name=r", *overrides])
        run_dir = str(tmp_path / "r")
        storage.write_bytes(f"{run_dir}/run.json", b'{"run_id": "id"}')
        storage.write_bytes(f"{run_dir}/config.yaml", to_yaml(config).encode())
        uri = checkpoint.step_dir(run_dir, 2)
        entries = checkpoint.write_files(uri, {"a": b"a"})
        kept = resume.state_of(config, inputs) if state is None else state
        return checkpoint.commit(uri, entries, kept, run_id="id", step=2, result_hash=config.result_hash(inputs))
    return save


def now(*overrides: str) -> Config:
    return load(None, [OCR, *overrides])


@pytest.mark.parametrize("override", [
    "eval.every_steps=7", "eval.seed=7", "eval.num_steps=3", "run.steps=1000", "pools.rollout.replicas=5", "logging.live=false",
    "checkpoint.every_steps=2", "rewards.ocr.retries=3", "train.ratio_tolerance=1", "train.max_skipped_updates=3",
    "rewards.jpeg_compressibility.weight=0", "data.eval_prompts=builtin:tiny/heldout.txt", "model.offload_encoders=true"])
def test_what_decides_no_result_may_change(saved, override):
    assert resume.check(saved(), now(override), INPUTS) == resume.Resume()


@pytest.mark.parametrize(("override", "line"), [
    ("train.learning_rate=1e-3", "train.learning_rate: 0.0003 -> 0.001"),
    ("sampling.window.range=[0, 5]", "sampling.window.range: None -> [0, 5]"),
    ("data.negative_prompt=blurry", "data.negative_prompt: \"\" -> \"blurry\""),
    ("rewards.ocr.options.mode=recognition", "rewards.ocr.options.mode: absent -> \"recognition\""),
    ("rewards.jpeg_compressibility.weight=0.5", "rewards.jpeg_compressibility: absent -> weight 0.5"),
    ("rewards={jpeg_compressibility: {}, ocr: {weight: 0}}", "rewards.ocr: weight 1 -> absent")])
def test_what_decides_the_result_is_named_with_the_ways_out_and_can_be_accepted(saved, override, line):
    info = saved()
    with pytest.raises(ResumeError) as caught:
        resume.check(info, now(override), INPUTS)
    text, key = str(caught.value), line.partition(":")[0]
    assert f"\n  {line}" in text and key in text.partition("run.accept_changes=[")[2].partition("]")[0]
    assert f"lora.init_from={info.uri}/adapter" in text and "group_size" not in text
    accepted = text.partition("run.accept_changes=[")[2].partition("]")[0]
    found = resume.check(info, now(override, f"run.accept_changes=[{accepted}]"), INPUTS)
    assert line in map(str, found.accepted)


def test_a_change_that_is_not_named_stays_rejected(saved):
    with pytest.raises(ResumeError, match="train.seed: 42 -> 1") as caught:
        resume.check(saved(), now("train.seed=1", "loss.beta=1", "run.accept_changes=[loss]"), INPUTS)
    assert "loss.beta" not in str(caught.value)


def test_a_key_to_accept_that_is_none_is_an_error(saved):
    for key, near in (("train.learning_rat", "train.learning_rate"), ("eval.seed", "decides the result")):
        with pytest.raises(ConfigError, match=f"{key}.*{near}"):
            resume.check(saved(), now(f"run.accept_changes=[{key}]"), INPUTS)


def test_other_contents_are_rejected_by_name_and_can_be_accepted(saved):
    info = saved()
    other = {"data.train_prompts": {"": "sha256:dddd"}, "model.path": {**INPUTS["model.path"], "x.json": "sha256:e"}}
    with pytest.raises(ResumeError) as caught:
        resume.check(info, now(), other)
    text = str(caught.value)
    assert "data.train_prompts (builtin:tiny/train.txt): aaaa -> dddd" in text
    assert "model.path (builtin:tiny)" in text and "(x.json)" in text and "run.accept_changed_inputs=true" in text
    found = resume.check(info, now("run.accept_changed_inputs=true"), other)
    assert [change.key for change in found.accepted] == ["data.train_prompts", "model.path"]


def test_a_file_may_lie_elsewhere(saved):
    info = saved("data.train_prompts=/a/train.txt", "model.revision=main")
    assert resume.check(info, now("data.train_prompts=/b/train.txt"), INPUTS) == resume.Resume()


def test_an_input_that_is_new_or_gone_is_a_changed_setting(saved):
    with pytest.raises(ResumeError, match="lora.init_from: None -> \"/x\""):
        resume.check(saved(), now("lora.init_from=/x"), INPUTS | {"lora.init_from": {"": "sha256:f"}})


def test_a_checkpoint_of_an_earlier_version_resumes_and_says_what_cannot_be_checked(saved):
    info = saved("data.train_prompts=/a/train.txt", state={"totals": {}})
    found = resume.check(info, now("data.train_prompts=/a/train.txt"), INPUTS)
    assert not found.accepted and len(found.notes) == 1 and "no digests" in found.notes[0]
    with pytest.raises(ResumeError, match="data.train_prompts: \"/a/train.txt\" -> \"/b/train.txt\""):
        resume.check(info, now("data.train_prompts=/b/train.txt"), INPUTS)
    with pytest.raises(ResumeError, match="train.seed"):
        resume.check(info, now("data.train_prompts=/a/train.txt", "train.seed=3"), INPUTS)


def test_an_earlier_version_saved_relative_paths(saved, tmp_path):
    info = saved(state={"totals": {}})
    tree = now().model_dump(mode="json")
    tree["data"]["train_prompts"] = "./prompts/train.txt"
    storage.write_bytes(f"{tmp_path}/r/config.yaml", json.dumps(tree).encode())
    assert not resume.check(info, now("data.train_prompts=/a/prompts/train.txt"), INPUTS).accepted
    with pytest.raises(ResumeError, match="data.train_prompts"):
        resume.check(info, now("data.train_prompts=/a/prompts/other.txt"), INPUTS)


def test_settings_that_a_checkpoint_does_not_know_have_their_defaults(saved):
    config = now()
    tree = config.model_dump(mode="json")
    del tree["train"]["weight_decay"], tree["eval"]
    tree["train"]["old_option"] = 1
    info = saved(state={"config": json.dumps(tree), "inputs": INPUTS})
    with pytest.raises(ResumeError) as caught:
        resume.check(info, config, INPUTS)
    assert "train.old_option: 1 -> absent" in str(caught.value) and "weight_decay" not in str(caught.value)


def test_every_leaf_has_one_mark_and_the_sections_are_as_documented():
    marks = {key: setting.mark for key, setting in now().settings().items()}
    assert set(marks.values()) == {RESULT, EVALUATION, INFRASTRUCTURE}
    by_section = {}
    for key, mark in marks.items():
        by_section.setdefault(key.split(".")[0], set()).add(mark)
    for section in ("run", "pools", "logging", "checkpoint"):
        assert by_section[section] == {INFRASTRUCTURE}, section
    assert by_section["eval"] == {EVALUATION}
    for section in ("sampling", "advantage", "loss", "lora"):
        assert by_section[section] == {RESULT}, section
    text = to_yaml(now(), documented=True)
    assert "# Evaluation by ODE at fixed seeds [evaluation]\neval:" in text
    assert "at_start: true" in text and "# Prompt file: .txt, .jsonl or .parquet [input]" in text


def test_a_run_records_what_it_accepted_and_accepts_it_once(saved, tmp_path):
    def recorder(*overrides):
        return Recorder(now(f"run.dir={tmp_path}", "run.name=r", *overrides), INPUTS)

    saved()
    first = recorder("train.learning_rate=0.1", "run.accept_changes=[train.learning_rate]")
    assert first.notes == ["accepted: train.learning_rate: 0.0003 -> 0.1"]
    first.open()
    first.close()
    run = json.loads((tmp_path / "r" / "run.json").read_text())
    assert run["accepted_changes"] == [{"step": 2, "key": "train.learning_rate", "old": "0.0003", "new": "0.1"}]
    again = load(tmp_path / "r" / "config.yaml")
    assert again.train.learning_rate == 0.1 and again.run.accept_changes == []
    with pytest.raises(ResumeError, match="train.learning_rate: 0.0003 -> 0.1"):
        Recorder(again, INPUTS)  # the checkpoint is still of before
    back = recorder()
    back.open()
    back.close()
    assert json.loads((tmp_path / "r" / "run.json").read_text())["accepted_changes"] == []


def test_accepted_changes_are_in_the_report(tmp_path):
    from flowgrpo_ray.views.report import render

    storage.write_bytes(f"{tmp_path}/run.json", json.dumps({"run_id": "x", "accepted_changes": [
        {"step": 20, "key": "train.learning_rate", "old": "0.0003", "new": "<b>"}]}).encode())
    page = render(str(tmp_path))
    assert "train.learning_rate" in page and "0.0003" in page and "&lt;b&gt;" in page
    assert from_tree({"rewards": {"ocr": {}}})  # and a run without any has no such part
    storage.write_bytes(f"{tmp_path}/run.json", b'{"run_id": "x"}')
    assert "Changes accepted" not in render(str(tmp_path))
