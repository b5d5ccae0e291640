"""Adapter files: stock diffusers restores every key, rank and alpha; what is not for this model is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from peft.tuners.lora import LoraLayer
from policy_steps import HEIGHT, PROMPTS, WIDTH, conditioning, euler, noise

from flowgrpo_ray.config.schema import LoraSection
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.policies import lora

FILE = "pytorch_lora_weights.safetensors"
SETTINGS = LoraSection(rank=4, alpha=12)  # alpha is neither r nor 2 r: a default would be seen


def trained(policy, section: LoraSection = SETTINGS):
    """Attach an adapter and give it weights as if it were trained; returns (arrays, settings)."""
    settings = lora.attach(policy, section, seed=0)
    rng = np.random.default_rng(5)
    state = {key: rng.normal(0, 0.2, param.shape).astype(np.float32) for key, param in lora.parameters(policy).items()}
    lora.write_state(policy, state)
    return state, settings


@pytest.fixture(scope="module")
def saved(fresh, tmp_path_factory):
    """saved(kind) -> (folder, arrays, settings) of an adapter of that model."""
    done = {}

    def save(kind: str):
        if kind not in done:
            policy, folder = fresh(kind, parts="learner"), tmp_path_factory.mktemp("adapter") / kind
            state, settings = trained(policy)
            assert lora.save_adapter(folder, state, settings, policy) == folder / FILE
            done[kind] = folder, state, settings
        return done[kind]

    return save


@pytest.mark.parametrize(("kind", "pipeline_class", "guidance"), [
    ("sd3_t5", StableDiffusion3Pipeline, 3.0), ("flux_dev", FluxPipeline, 3.5)])
def test_stock_diffusers_restores_the_adapter(fresh, folders, saved, kind, pipeline_class, guidance):
    policy, (folder, state, _) = fresh(kind), saved(kind)
    lora.attach(policy, SETTINGS, seed=1)
    lora.write_state(policy, state)
    x = noise(policy)
    given = conditioning(policy, negatives=["blurry", "words"] if kind == "sd3_t5" else None)
    ours = policy.decode_float(euler(policy, x, given, guidance), HEIGHT, WIDTH)
    pipeline = pipeline_class.from_pretrained(folders(kind), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    call = dict(prompt=PROMPTS, height=HEIGHT, width=WIDTH, num_inference_steps=4, guidance_scale=guidance, latents=x,
                max_sequence_length=12, output_type="pt")
    if kind == "sd3_t5":
        call["negative_prompt"] = ["blurry", "words"]
    base = pipeline(**call).images
    pipeline.load_lora_weights(str(folder), adapter_name="mine")
    images = pipeline(**call).images
    assert (images - ours).abs().max() <= 1e-5
    assert (images - base).abs().max() > 1e-2
    config = pipeline.transformer.peft_config["mine"]
    assert (config.r, config.lora_alpha) == (4, 12)
    layers = {name: m for name, m in pipeline.transformer.named_modules() if isinstance(m, LoraLayer)}
    with safetensors.safe_open(folder / FILE, framework="pt") as file:  # names these layers and no other, to any reader
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert metadata["transformer.target_modules"] == sorted(layers)
    assert {m.scaling["mine"] for m in layers.values()} == {3.0}
    restored = {f"transformer.{name}.lora_{side}.weight": getattr(m, f"lora_{side}")["mine"].weight.detach().numpy()
                for name, m in layers.items() for side in "AB"}
    assert lora.digest(restored) == lora.digest(state)  # every key used, none left at a default, none too many


@pytest.mark.parametrize("kind", ["sd3_t5", "flux_dev"])
def test_an_adapter_is_read_back_and_starts_another_run(fresh, saved, kind):
    folder, state, settings = saved(kind)
    arrays, read = lora.load_adapter(folder)
    assert lora.digest(arrays) == lora.digest(state)
    assert (read.rank, read.alpha) == (settings.rank, settings.alpha) == (4, 12.0)
    policy = fresh(kind, parts="learner", dtype="bfloat16")
    section = LoraSection(init_from=str(folder), targets=list(settings.targets), rank=4)
    assert lora.attach(policy, section, seed=9) == read
    assert lora.digest(lora.read_state(policy)) == lora.digest(state)
    assert all(param.requires_grad and param.dtype == torch.float32 for param in lora.parameters(policy).values())


def test_settings_beside_init_from_may_not_contradict_it(fresh, saved):
    folder = str(saved("sd3_t5")[0])
    for section, message in (
        (LoraSection(init_from=folder, rank=8), "lora.rank is 8, but the adapter of lora.init_from has 4"),
        (LoraSection(init_from=folder, alpha=8), "lora.alpha is 8, but .* has 12"),
        (LoraSection(init_from=folder, targets=["attn.to_q"]), "other layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            lora.attach(fresh("sd3_t5", parts="learner"), section, seed=0)


def test_an_adapter_of_another_model_is_refused(fresh, saved, tmp_path):
    foreign = fresh("flux_dev", parts="learner")
    with pytest.raises(ConfigError, match="not for this model: .* layers are not in it"):
        lora.attach(foreign, LoraSection(init_from=str(saved("sd3_t5")[0])), seed=0)
    assert not lora.parameters(foreign)
    arrays, settings = saved("sd3_t5")[1:]
    key = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
    lora.save_adapter(tmp_path / "wide", {**arrays, key: np.zeros((4, 64), np.float32)}, settings, foreign)
    with pytest.raises(ConfigError, match=r"is \(4, 64\), and the model needs \(4, 32\)"):
        lora.attach(fresh("sd3_t5", parts="learner"), LoraSection(init_from=str(tmp_path / "wide")), seed=0)
    renamed = {f"unet{key.removeprefix('transformer')}": array for key, array in arrays.items()}
    _write(tmp_path / "unet", renamed, {"unet.r": 4, "unet.lora_alpha": 12})
    with pytest.raises(ConfigError, match="weights of unet; the choices are transformer"):
        lora.attach(fresh("sd3_t5", parts="learner"), LoraSection(init_from=str(tmp_path / "unet")), seed=0)


def _write(folder, arrays, metadata) -> str:
    folder.mkdir()
    header = {} if metadata is None else {"lora_adapter_metadata": json.dumps(metadata)}
    safetensors.torch.save_file(
        {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}, folder / FILE, metadata=header)
    return str(folder)


def test_unusable_adapter_files_are_named(saved, tmp_path):
    arrays = saved("sd3_t5")[1]
    good = {"transformer.r": 4, "transformer.lora_alpha": 12}
    key = next(iter(arrays))
    without_one = {name: array for name, array in arrays.items() if name != key}
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / FILE).write_bytes(b"torn")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_lora_weight.safetensors").write_bytes(b"")
    cases = [
        (tmp_path / "absent", "no such folder"),
        (tmp_path / "empty", f"it has no {FILE}"),
        (tmp_path / "other", "did you mean pytorch_lora_weight.safetensors"),
        (tmp_path / "torn", "not a readable safetensors file"),
        (_write(tmp_path / "bare", arrays, None), "no adapter metadata .* scale alpha / r would be wrong"),
        (_write(tmp_path / "no_alpha", arrays, {"transformer.r": 4}), "lack r or lora_alpha of transformer"),
        (_write(tmp_path / "wrong_rank", arrays, {**good, "transformer.r": 8}), "not of rank 8"),
        (_write(tmp_path / "pattern", arrays, {**good, "transformer.rank_pattern": {"a": 2}}), "uses rank_pattern"),
        (_write(tmp_path / "half", without_one, good), "only one of lora_A and lora_B"),
        (_write(tmp_path / "kohya", {"lora_unet_x.lora_down.weight": arrays[key]}, good), "is no LoRA in diffusers"),
    ]
    for folder, message in cases:
        with pytest.raises(ConfigError, match=message):
            lora.load_adapter(folder)


def test_saving_over_a_file_or_under_a_wrong_key_is_an_error(saved, tmp_path):
    _, arrays, settings = saved("sd3_t5")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        lora.save_adapter(tmp_path / "file", arrays, settings, StableDiffusion3Pipeline)
    with pytest.raises(ValueError, match="not the key of a LoRA weight"):
        lora.save_adapter(tmp_path / "out", {"transformer.x.weight": arrays[next(iter(arrays))]}, settings,
                          StableDiffusion3Pipeline)
