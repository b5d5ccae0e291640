"""What is wrong with the adapter or the model's files is found in the driver, before any actor starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import small_config

from flowgrpo_ray import tiny
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.preflight import check


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
