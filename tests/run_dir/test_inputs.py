"""Identities of inputs: contents count, places do not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs import small_config

from flowgrpo_ray import tiny
from flowgrpo_ray.config import load
from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.policies.source import hub_commit
from flowgrpo_ray.run_dir import inputs
from flowgrpo_ray.run_dir.inputs import identify


@pytest.fixture
def made(tmp_path):
    """A configuration with a copy of the demo's inputs in a folder, and the folder."""
    def make(name: str):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copytree(tiny.model_dir(), folder / "model")
        (folder / "train.txt").write_text("the word \"A\"\n")
        (folder / "eval.txt").write_text("the word \"B\"\n")
        (folder / "adapter").mkdir()
        (folder / "adapter" / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
        return small_config(folder, "run", overrides={
            "model.path": str(folder / "model"), "data.train_prompts": str(folder / "train.txt"),
            "data.eval_prompts": str(folder / "eval.txt"), "lora": {"init_from": str(folder / "adapter")}}), folder
    return make


def test_the_same_contents_elsewhere_are_the_same_inputs(made):
    (a, folder), (b, _) = made("a"), made("b")
    (folder / "model" / ".cache").mkdir()
    (folder / "model" / "README.md").write_text("x")  # not read
    assert identify(a) == identify(b)
    assert identify(a).keys() == {"data.train_prompts", "data.eval_prompts", "lora.init_from", "model.path"}
    assert a.result_hash(identify(a)) == b.result_hash(identify(b)) != a.result_hash()


@pytest.mark.parametrize(("file", "key", "part"), [
    ("train.txt", "data.train_prompts", ""), ("eval.txt", "data.eval_prompts", ""),
    ("adapter/pytorch_lora_weights.safetensors", "lora.init_from", ""),
    ("model/model_index.json", "model.path", "model_index.json"),
    ("model/transformer/config.json", "model.path", "transformer/config.json"),
    ("model/transformer/diffusion_pytorch_model.safetensors", "model.path",
     "transformer/diffusion_pytorch_model.safetensors")])
def test_one_changed_byte_of_the_same_size_is_another_input(made, file, key, part):
    config, folder = made("a")
    before, path = identify(config), folder / file
    data = path.read_bytes()
    path.write_bytes(data.replace(b" ", b"\t", 1) if file.endswith(".json") else data[:-1] + b"?")
    after = identify(config)
    assert {other for other in before if before[other] != after[other]} == {key}
    assert {name for name in before[key] if before[key][name] != after[key][name]} == {part}
    same_hash = config.result_hash(before) == config.result_hash(after)
    assert same_hash == (key == "data.eval_prompts")


def test_of_a_large_file_samples_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_WHOLE", 1000)
    monkeypatch.setattr(inputs, "_SAMPLE", 10)
    file = tmp_path / "weights"
    file.write_bytes(bytes(100_000))
    before = inputs._sampled(file)
    for place in (0, 99_999):
        data = bytearray(100_000)
        data[place] = 1
        file.write_bytes(data)
        assert inputs._sampled(file) != before
    file.write_bytes(bytes(100_001))
    assert inputs._sampled(file) != before
    file.write_bytes(bytes(i % 251 for i in range(100_000)))
    assert inputs._sampled(file).startswith("sampled:")


def test_a_local_model_of_a_reward_is_an_input(tmp_path):
    (tmp_path / "rec").mkdir()
    (tmp_path / "rec" / "inference.onnx").write_bytes(b"1")
    config = load(None, [f"rewards.ocr.options.rec_model_dir={tmp_path / 'rec'}"])
    before = identify(config)
    assert before["rewards.ocr.options.rec_model_dir"].keys() == {"inference.onnx"}
    (tmp_path / "rec" / "inference.onnx").write_bytes(b"2")
    assert config.result_hash(identify(config)) != config.result_hash(before)
    Path(tmp_path / "rec").rename(tmp_path / "moved")
    assert "rewards.ocr.options.rec_model_dir" not in identify(config)


def test_a_hub_model_is_its_commit(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo, commit = tmp_path / "models--owner--name", "0123456789" * 4
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "model_index.json").write_text("{}")
    assert hub_commit(ModelConfig(path="owner/name")) == commit
