"""What is wrong with the adapter or the model's files is found in the driver, before any actor starts."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from runs import small_config
from tiny_pipelines import build

from flowgrpo_ray import tiny
from flowgrpo_ray.config import load
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.preflight import check
from flowgrpo_ray.rewards import RewardError
from flowgrpo_ray.rewards.jpeg import JpegCompressibility


@pytest.mark.parametrize(("overrides", "message"), [
    ({"lora.targets": ["attn.to_qq"]}, "ends in 'attn.to_qq'; did you mean attn.to_q"),
    ({"lora.targets": []}, "lora.targets is empty"),
    ({"lora.init_from": "/nowhere/adapter"}, "no adapter at /nowhere/adapter"),
    ({"lora.init_from": "{other}"}, "is not for this model"),
    ({"lora.init_from": "{own}", "lora.rank": 8}, "lora.rank is 8, but the adapter of lora.init_from has 4"),
])
def test_an_adapter_that_does_not_fit(tmp_path, overrides, message):
    from diffusers import StableDiffusion3Pipeline

    from flowgrpo_ray.policies.lora import LoraSettings, save_adapter

    def adapter(name: str, columns: int) -> str:
        layer = "transformer.transformer_blocks.0.attn.to_q"
        arrays = {f"{layer}.lora_A.weight": np.zeros((4, columns), np.float32),
                  f"{layer}.lora_B.weight": np.zeros((columns, 4), np.float32)}
        save_adapter(tmp_path / name, arrays, LoraSettings(4, 8.0, ()), StableDiffusion3Pipeline)
        return str(tmp_path / name)

    width = json.loads((tiny.model_dir() / "transformer" / "config.json").read_text())
    own = adapter("own", width["num_attention_heads"] * width["attention_head_dim"])
    places = {"{other}": adapter("other", 7), "{own}": own}
    overrides = {key: places.get(value, value) if isinstance(value, str) else value for key, value in overrides.items()}
    with pytest.raises(ConfigError, match=message):
        check(small_config(tmp_path, "x", overrides=overrides))
    assert check(small_config(tmp_path, "y", overrides={"lora.init_from": own, "lora.rank": None})).train


def test_all_that_is_wrong_is_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check(small_config(tmp_path, "x", overrides={
            "data.train_prompts": str(tmp_path / "none.txt"), "data.eval_prompts": str(tmp_path / "other.txt"),
            "lora.targets": ["attn.to_qq"]}))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].split(" ")[0] for line in lines] == ["lora.targets", "data.train_prompts", "data.eval_prompts"]
    with pytest.raises(ConfigError, match=r"(?s)rewards.ocr.options: .*widht.*\nrewards.heavy.weight is 1e\+09"):
        check(load(None, ["rewards={ocr: {options: {widht: 1}}, heavy: {type: ocr, weight: 1e9}}"]))


GUARD = {"loss.ratio_norm": True, "loss.clip_low": 2e-6, "loss.clip_high": 2e-6, "sampling.guidance_scale": 4.5,
         "train.updates_per_step": 2}


@pytest.mark.parametrize(("overrides", "limit"), [
    ({"model.dtype": "bfloat16"}, "about 1e-05.*or model.dtype: float16"),
    ({"model.dtype": "bfloat16", "sampling.guidance_scale": 1.0}, None),
    ({"model.dtype": "bfloat16", "train.updates_per_step": 1}, None),
    ({"model.dtype": "bfloat16", "loss.clip_low": 1e-4, "loss.clip_high": 1e-4}, None),
    ({"model.dtype": "float16"}, None),
    ({"model.dtype": "float16", "loss.clip_high": 1e-6}, "the clip range 1e-06 .* about 2e-06.*updates_per_step: 1 "),
    ({}, None)])
def test_a_clip_range_below_the_rounding_of_the_base_is_warned_of(tmp_path, caplog, overrides, limit):
    with caplog.at_level(logging.WARNING):
        check(small_config(tmp_path, "x", overrides={**GUARD, **overrides}))
    said = [record.getMessage() for record in caplog.records if "clip range" in record.getMessage()]
    assert [bool(re.search(limit, text)) for text in said] == [True] if limit else not said


URL, ENDPOINT = {"url": "http://127.0.0.1:9"}, {"base_url": "http://127.0.0.1:9/v1"}


@pytest.mark.parametrize(("reward", "messages"), [
    ({"type": "remote", "timeout_s": 63.0, "options": URL},
     ["rewards.far.timeout_s is 63, and", "rewards.far.options.timeout_s", "63.5 s", "use 64"]),
    ({"type": "geneval", "timeout_s": 9.0, "options": URL | {"timeout_s": 9.0, "retries": 0}}, ["use 10"]),
    ({"type": "deqa", "timeout_s": 30.0, "options": URL | {"retries": 0}}, ["use 61"]),
    ({"type": "vlm_judge", "options": ENDPOINT | {"timeout_s": 300}}, ["rewards.far.timeout_s is 120", "use 304"]),
    ({"type": "qwen_vl", "options": ENDPOINT | {"retries": 9}}, ["rewards.far.timeout_s is 120", "use 182"]),
    ({"type": "vlm_preference", "options": ENDPOINT | {"max_pairs": 1}},
     ["rewards.far.options: reward vlm_preference: max_pairs 1 leaves images of a group of 4 out; use "
      "at least 2 (sampling.group_size is 4)"]),
    ({"python": "own_rewards:brightness", "options": {"scale": float("nan")}},
     ["rewards.far.options: reward brightness: option scale is nan, not a finite number"]),
    ({"type": "video_ocr"}, ["rewards.far: reward video_ocr scores videos; training samples images; did you mean ocr?"]),
    ({"python": "own_rewards:Limited"},
     ["pools.reward.far.num_gpus is 0.5, and reward limited works on the CPU; use 0"]),
    ({"python": "own_rewards:brightness", "weight": 1e300},
     ["rewards.far.weight is 1e+300; use a magnitude of at most 1e+06"]),
    ({"python": "own_rewards:brightness", "weight": -2e6}, ["rewards.far.weight is -2e+06"]),
    ({"python": "own_rewards:Misspelt"}, ["rewards.far: reward 'misspelt': Misspelt: scope is 'groups'; did you mean group"]),
    ({"python": "own_rewards:Unsure"}, ["reward far: check_prompt fails on line 1: ", "': KeyError: 'colour'"]),
])
def test_a_reward_that_does_not_fit_into_the_run(tmp_path, reward, messages):
    with pytest.raises(ConfigError) as error:
        gpus = {"pools.reward.far.num_gpus": 0.5} if reward.get("python", "").endswith("Limited") else {}
        check(small_config(tmp_path, "x", overrides={"rewards.far": reward, **gpus}))
    assert all(message in str(error.value) for message in messages), error.value


@pytest.mark.parametrize("reward", [
    {"type": "remote", "options": URL}, {"type": "vlm_judge", "options": ENDPOINT},
    {"type": "remote", "timeout_s": 64.0, "options": URL}, {"python": "own_rewards:brightness", "weight": -1e6},
    {"type": "vlm_preference", "options": ENDPOINT | {"max_pairs": 2}}, {"type": "vlm_preference", "options": ENDPOINT},
])
def test_defaults_and_the_nearest_right_values_fit(tmp_path, reward):
    assert check(small_config(tmp_path, "x", overrides={"rewards.far": reward})).train


@pytest.mark.parametrize(("reward", "overrides", "requests", "rest"), [
    ({"type": "remote", "options": URL | {"batch_size": 3}}, {"sampling.micro_batch": 8}, 3,
     "has 120 s for all of them (rewards.far.timeout_s): 40 s for each. If the server is slower calls fail: then raise "
     "timeout_s, or send fewer (batch_size in rewards.far.options)"),
    ({"type": "remote", "options": URL}, {"sampling.micro_batch": 24}, 2, "60 s for each"),
    ({"type": "remote", "options": URL}, {"sampling.micro_batch": 8, "eval.micro_batch": 40}, 3, "a call for 40 images"),
    ({"type": "geneval", "timeout_s": 64, "options": URL | {"batch_size": 4}}, {"sampling.micro_batch": 8}, 2, "32 s for each"),
    ({"type": "geneval", "options": URL}, {"sampling.micro_batch": 24}, 2, "60 s for each"),
    ({"type": "deqa", "timeout_s": 127, "options": URL | {"batch_size": 4}}, {"sampling.micro_batch": 8}, 2, "64 s for each"),
    ({"type": "vlm_judge", "options": ENDPOINT | {"concurrency": 3}}, {"sampling.micro_batch": 8}, 3,
     "send fewer (concurrency in rewards.far.options)"),
    ({"type": "vlm_preference", "options": ENDPOINT}, {}, 69,
     "a call for 24 images sends 69 requests one after another (those under way at once count as one), and has 120 s for all "
     "of them (rewards.far.timeout_s): 1.7 s for each. If the server is slower calls fail: then raise timeout_s, or send fewer "
     "(concurrency, max_pairs in rewards.far.options)"),
    ({"type": "vlm_preference", "options": ENDPOINT | {"max_pairs": 12}}, {}, 3, "a call for 24 images"),
    # What a call has room for.
    ({"type": "remote", "timeout_s": 127.5, "options": URL | {"batch_size": 4}}, {"sampling.micro_batch": 8}, None, ""),
    ({"type": "remote", "options": URL}, {"sampling.micro_batch": 8}, None, ""),
    ({"type": "remote_group", "options": URL}, {}, None, ""),
    ({"type": "geneval", "options": {"detector": "x", "batch_size": 1}}, {"sampling.micro_batch": 24}, None, ""),
    ({"type": "vlm_judge", "options": ENDPOINT}, {"sampling.micro_batch": 8}, None, ""),
    ({"type": "unified_reward", "options": ENDPOINT | {"concurrency": 24}}, {"sampling.micro_batch": 24}, None, ""),
    ({"type": "vlm_preference", "options": ENDPOINT | {"max_pairs": 2, "concurrency": 4}}, {"sampling.group_size": 4}, None,
     ""),
])
def test_the_requests_of_a_call_together_are_warned_of(tmp_path, caplog, monkeypatch, reward, overrides, requests, rest):
    monkeypatch.setattr("flowgrpo_ray.rewards.geneval.metadata_problem", lambda metadata: None)
    sampling = {"sampling.group_size": 24, "sampling.micro_batch": 4} | overrides
    with caplog.at_level(logging.WARNING):
        check(small_config(tmp_path, "x", overrides=sampling | {"rewards.far": reward}))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rewards.far: ")]
    if requests is None:
        assert not said
        return
    (text,) = said
    assert f"sends {requests} requests one after another" in text and rest in text


def test_metadata_that_a_server_cannot_be_sent(tmp_path):
    rows = [{"prompt": "a cat"}, {"prompt": "a dog", "made": datetime(2026, 1, 2)}]
    parquet.write_table(pa.Table.from_pylist(rows, pa.schema([("prompt", pa.string()), ("made", pa.timestamp("s"))])),
                        tmp_path / "p.parquet")
    overrides = {"data.train_prompts": str(tmp_path / "p.parquet")}
    assert check(small_config(tmp_path, "x", overrides=overrides)).train
    with pytest.raises(ConfigError, match=r"cannot be scored by reward far:\n  line 2: 'a dog': metadata 'made' is datetime"):
        check(small_config(tmp_path, "x", overrides=overrides | {"rewards.far": {"type": "remote", "options": URL}}))


def test_exit_in_the_check_of_a_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(JpegCompressibility, "check_prompt", classmethod(lambda cls, *_, **__: sys.exit(0)))
    with pytest.raises(RewardError, match=r"reward jpeg_compressibility called sys.exit\(0\)"):
        check(small_config(tmp_path, "x"))


def tiny_copy(folder: Path) -> Path:
    return Path(shutil.copytree(tiny.model_dir(), folder / "copy"))


def without_weights(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()


def truncated(folder: Path) -> None:
    file = folder / "text_encoder" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def shard_missing(folder: Path) -> None:
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("diffusion_pytorch_model-00001-of-00002.safetensors"))
    index = {"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors",
                            "b": "diffusion_pytorch_model-00002-of-00002.safetensors"}}
    weights.with_name(weights.name + ".index.json").write_text(json.dumps(index))


def no_vae_config(folder: Path) -> None:
    (folder / "vae" / "config.json").write_text("[]")


@pytest.mark.parametrize(("damage", "message"), [
    (without_weights, "there are no weights in .*transformer"),
    (truncated, "text_encoder/model.safetensors is damaged"),
    (shard_missing, "lacks diffusion_pytorch_model-00002-of-00002.safetensors, which .*index.json names"),
    (no_vae_config, "vae/config.json cannot be read: ValueError: it holds a list"),
])
def test_model_files_that_are_missing_or_damaged(tmp_path, damage, message):
    folder = tiny_copy(tmp_path)
    config = small_config(tmp_path, "x", overrides={"model.path": str(folder)})
    assert check(config).train  # the copy itself is sound
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        check(config)


@pytest.mark.parametrize(("kind", "overrides", "message"), [
    ("flux_dev", {"data.negative_prompt": "blurry", "sampling.guidance_scale": 3.5},
     "data.negative_prompt: ignored, as a model of the family flux takes guidance as an input: there is no CFG pass"),
    ("sd3_no_t5", {"data.train_prompts": "{own}"},
     "the negative_prompt of 1 record: ignored, as guidance_scale is not above 1"),
    ("sd3_no_t5", {"data.negative_prompt": "blurry", "eval.guidance_scale": 4.5}, None),
    ("flux_dev", {"sampling.guidance_scale": 3.5}, None),
])
def test_negative_prompts_that_nothing_reads_are_said_to_be_ignored(kind, overrides, message, tmp_path, caplog):
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"prompt": "a cat", "negative_prompt": "a dog"}\n{"prompt": "a cow"}\n')
    overrides = {key: str(prompts) if value == "{own}" else value for key, value in overrides.items()}
    model = build(kind, tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        inputs = check(small_config(tmp_path, "x", overrides={"model.path": str(model), **overrides}))
    assert inputs.family == kind.partition("_")[0]
    said = [record.message for record in caplog.records if "ignored" in record.message]
    assert len(said) == bool(message) and all(message in text for text in said)
