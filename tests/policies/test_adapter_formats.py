"""Adapters for other loaders: what each loader makes of its file is the same image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from policy_steps import HEIGHT, PROMPTS, WIDTH, noise
from safetensors.torch import load as load_safetensors
from safetensors.torch import save_file

from flowgrpo_ray.config.schema import LoraSection
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.adapter_formats import encode
from flowgrpo_ray.policies.flux import FluxPolicy
from flowgrpo_ray.policies.lora import LoraSettings

FILE = "pytorch_lora_weights.safetensors"
RANK, ALPHA = 4, 10  # alpha is neither r nor 2 r, and 10 / 4 is not a power of two
MODELS = {"sd3_dynamic": (StableDiffusion3Pipeline, "sd3"), "flux_dev": (FluxPipeline, "flux")}
WHOLE_SD3 = ["attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_k_proj", "attn.to_add_out", "attn2.to_q",
             "attn2.to_out.0", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj"]  # not all of q, k, v

# What ComfyUI (comfy/lora.py, comfy/utils.py) and kohya's sd-scripts take a key for: the original layer
# by its name, and the layers of diffusers whose rows it holds.
ORIGINAL = {
    "sd3": {
        "joint_blocks_{}_x_block_attn_qkv": "transformer_blocks.{}.attn.to_q to_k to_v",
        "joint_blocks_{}_x_block_attn_proj": "transformer_blocks.{}.attn.to_out.0",
        "joint_blocks_{}_x_block_attn2_qkv": "transformer_blocks.{}.attn2.to_q to_k to_v",
        "joint_blocks_{}_x_block_attn2_proj": "transformer_blocks.{}.attn2.to_out.0",
        "joint_blocks_{}_x_block_mlp_fc1": "transformer_blocks.{}.ff.net.0.proj",
        "joint_blocks_{}_x_block_mlp_fc2": "transformer_blocks.{}.ff.net.2",
        "joint_blocks_{}_context_block_attn_qkv":
            "transformer_blocks.{}.attn.add_q_proj add_k_proj add_v_proj",
        "joint_blocks_{}_context_block_attn_proj": "transformer_blocks.{}.attn.to_add_out",
        "joint_blocks_{}_context_block_mlp_fc1": "transformer_blocks.{}.ff_context.net.0.proj",
        "joint_blocks_{}_context_block_mlp_fc2": "transformer_blocks.{}.ff_context.net.2",
    },
    "flux": {
        "double_blocks_{}_img_attn_qkv": "transformer_blocks.{}.attn.to_q to_k to_v",
        "double_blocks_{}_img_attn_proj": "transformer_blocks.{}.attn.to_out.0",
        "double_blocks_{}_img_mlp_0": "transformer_blocks.{}.ff.net.0.proj",
        "double_blocks_{}_img_mlp_2": "transformer_blocks.{}.ff.net.2",
        "double_blocks_{}_txt_attn_qkv": "transformer_blocks.{}.attn.add_q_proj add_k_proj add_v_proj",
        "double_blocks_{}_txt_attn_proj": "transformer_blocks.{}.attn.to_add_out",
        "double_blocks_{}_txt_mlp_0": "transformer_blocks.{}.ff_context.net.0.proj",
        "double_blocks_{}_txt_mlp_2": "transformer_blocks.{}.ff_context.net.2",
        "single_blocks_{}_linear1": "single_transformer_blocks.{}.attn.to_q to_k to_v ../proj_mlp",
        "single_blocks_{}_linear2": "single_transformer_blocks.{}.proj_out",
    },
}


def original_layers(family: str) -> dict[str, list[str]]:
    layers = {}
    for name, places in ORIGINAL[family].items():
        first, *others = places.split()
        stem = first.rpartition(".")[0]
        block = ".".join(first.split(".")[:2])
        for i in range(4):
            layers[name.format(i)] = [part.format(i) for part in [
                first, *(f"{block}.{other[3:]}" if other.startswith("../") else f"{stem}.{other}"
                         for other in others)]]
    return layers


def merge(transformer, data: bytes, family: str) -> None:
    """Load a file as ComfyUI does: it knows no header metadata, and adds alpha / rank B A to the weights."""
    tensors, modules = load_safetensors(data), dict(transformer.named_modules())
    known = {f"transformer.{name}": [name] for name in modules}
    known |= {f"lora_unet_{name}": places for name, places in original_layers(family).items()}
    used = set()
    for stem, places in known.items():
        for down, up in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
            keys = [f"{stem}.{down}.weight", f"{stem}.{up}.weight"]
            if keys[0] not in tensors:
                continue
            a, b = (tensors[key] for key in keys)
            alpha = tensors.get(f"{stem}.alpha")
            change, top = b @ a * (1.0 if alpha is None else alpha.item() / len(a)), 0
            for place in places:
                weight = modules[place].weight
                weight.data += change[top : top + len(weight)]
                top += len(weight)
            assert top == len(change)
            used |= {*keys, f"{stem}.alpha"}
    assert set(tensors) <= used, "every key was known"


@pytest.fixture(scope="module")
def adapters(fresh):
    """adapters(kind) -> (arrays, settings), as if trained."""
    done = {}

    def adapter(kind: str):
        if kind not in done:
            policy = fresh(kind, parts="learner")
            targets = WHOLE_SD3 if kind == "sd3_dynamic" else None
            section = LoraSection(rank=RANK, alpha=ALPHA, targets=targets)
            settings = lora.attach(policy, section, seed=0)
            rng = np.random.default_rng(5)
            done[kind] = {key: rng.normal(0, 0.2, param.shape).astype(np.float32)
                          for key, param in lora.parameters(policy).items()}, settings
        return done[kind]

    return adapter


@pytest.fixture(scope="module")
def image(folders, shared):
    """image(kind, change): what the stock pipeline makes after `change(pipeline)`."""

    def make(kind: str, change=lambda pipeline: None) -> torch.Tensor:
        absent = ("text_encoder_3", "tokenizer_3") if kind == "sd3_dynamic" else ()
        pipeline = MODELS[kind][0].from_pretrained(
            folders(kind), dtype=torch.float32, **dict.fromkeys(absent))
        pipeline.set_progress_bar_config(disable=True)
        change(pipeline)
        return pipeline(
            prompt=PROMPTS, height=HEIGHT, width=WIDTH, num_inference_steps=3, guidance_scale=3.0,
            latents=noise(shared(kind)), max_sequence_length=12, output_type="pt").images

    return make


def through_file(tmp_path, data: bytes, *, without_metadata: bool = False):
    """A change that loads the file by diffusers, its header metadata dropped if asked."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    if without_metadata:
        save_file(load_safetensors(data), tmp_path / FILE)
    else:
        (tmp_path / FILE).write_bytes(data)
    return lambda pipeline: pipeline.load_lora_weights(str(tmp_path))


@pytest.mark.parametrize("kind", MODELS)
def test_every_format_gives_the_same_image(kind, adapters, image, tmp_path):
    (arrays, settings), family = adapters(kind), MODELS[kind][1]

    def file(format: str, **options) -> bytes:
        return encode(arrays, settings, format, family, **options)

    base, right = image(kind), image(kind, through_file(tmp_path / "right", file("diffusers")))
    assert (right - base).abs().max() > 0.02
    changes = {
        "diffusers, folded": through_file(tmp_path / "a", file("diffusers", fold_alpha=True)),
        "diffusers, folded, without metadata": through_file(
            tmp_path / "b", file("diffusers", fold_alpha=True), without_metadata=True),
        "by ComfyUI, folded": lambda pipeline: merge(
            pipeline.transformer, file("diffusers", fold_alpha=True), family),
    }
    for format in ("comfyui", "kohya"):
        for fold in (False, True):
            changes[f"{format} {fold}"] = lambda pipeline, data=file(format, fold_alpha=fold): merge(
                pipeline.transformer, data, family)
    if family == "flux":  # diffusers reads .alpha keys of FLUX itself
        changes["diffusers reads comfyui"] = through_file(tmp_path / "c", file("comfyui"))
    for name, change in changes.items():
        assert (image(kind, change) - right).abs().max() < 1e-4, name
    dropped = image(kind, through_file(tmp_path / "d", file("diffusers"), without_metadata=True))
    assert (dropped - right).abs().max() > 1e-3, "what the formats are for: alpha = r is another image"


def deltas(tensors: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    layers = {key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")}
    return {layer: scale * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
            for layer in layers}


@pytest.mark.parametrize("targets", ["all", "attention", "mlp"])
def test_diffusers_reads_a_kohya_file_of_flux(targets):
    """Its converter knows the widths of the real model alone, so the real shapes of two blocks."""
    width, rng = 3072, np.random.default_rng(3)
    double = [path for path in FluxPolicy.default_targets if not path.startswith("proj")]
    single = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"]
    blocks = {"transformer_blocks.0": double, "single_transformer_blocks.1": single}
    sizes = {path: (width, 4 * width) for path in ("ff.net.0.proj", "ff_context.net.0.proj", "proj_mlp")}
    sizes |= {"ff.net.2": (4 * width, width), "ff_context.net.2": (4 * width, width), "proj_out": (5 * width, width)}
    arrays = {}
    for block, paths in blocks.items():
        for path in paths:
            if (targets == "attention") != path.startswith("attn.") and targets != "all":
                continue
            fan_in, fan_out = sizes.get(path, (width, width))
            for side, shape in {"A": (RANK, fan_in), "B": (fan_out, RANK)}.items():
                array = rng.normal(size=shape).astype(np.float32)
                arrays[f"transformer.{block}.{path}.lora_{side}.weight"] = array
    data = encode(arrays, LoraSettings(RANK, ALPHA, ()), "kohya", "flux")
    read = deltas(_convert_kohya_flux_lora_to_diffusers(load_safetensors(data)), 1.0)
    ours = deltas({key: torch.from_numpy(array) for key, array in arrays.items()}, ALPHA / RANK)
    assert set(ours) <= set(read)
    for layer, delta in read.items():
        if layer in ours:
            assert (delta - ours[layer]).abs().max() < 1e-3, layer
        else:
            assert not delta.any(), layer


def test_a_folded_file_starts_another_run(adapters, tmp_path):
    arrays, settings = adapters("sd3_dynamic")
    data = encode(arrays, settings, "diffusers", "sd3", fold_alpha=True)
    tmp_path.joinpath(FILE).write_bytes(data)
    read, found = lora.load_adapter(tmp_path)
    assert (found.rank, found.alpha) == (RANK, RANK) and read.keys() == arrays.keys()
    key = next(key for key in arrays if ".lora_B." in key)
    np.testing.assert_array_equal(read[key], arrays[key] * np.float32(2.5))


def test_a_layer_without_a_name_in_the_format_is_an_error():
    layer = "transformer.transformer_blocks.0.norm1_context.linear"
    arrays = {f"{layer}.lora_{side}.weight": np.ones((2, 2), np.float32) for side in "AB"}
    with pytest.raises(ConfigError, match=f"kohya has no name for the layer {layer}"):
        encode(arrays, LoraSettings(2, 4, ()), "kohya", "sd3")
