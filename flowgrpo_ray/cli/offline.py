"""What the command line does in its own process, without Ray: images from a base or an adapter, and adapter export."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowgrpo_ray import storage
from flowgrpo_ray.config.load import Config, from_tree, load
from flowgrpo_ray.config.schema import LoraSection, ModelConfig
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.errors import CheckpointError, ConfigError, nearest
from flowgrpo_ray.run_dir import checkpoint
from flowgrpo_ray.run_dir.checkpoint import CheckpointInfo

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
GRID_IMAGES = 64  # first images of a sampling that its grid shows


# Run directories ------------------------------------------------------------------------------------------------------

def check_run_dir(run_dir: str) -> str:
    """`run_dir`, if a run lies there. Raises ConfigError, which names the nearest folder that holds one."""
    def holds_run(uri: str) -> bool:
        return any(storage.size(storage.join(uri, name)) is not None for name in ("run.json", "config.yaml"))

    if holds_run(run_dir):
        return run_dir
    above = storage.parent(run_dir)
    near = [name for name in storage.list_dir(above) if holds_run(storage.join(above, name))]
    raise ConfigError(f"no run directory at {storage.display(run_dir)}"
                      f"{nearest(storage.base_name(run_dir), near)}")


def place_of(config: str) -> list[str]:
    """Overrides that make a configuration which lies in a run directory mean that run, wherever the command is given."""
    file = Path(config).expanduser().absolute()
    if file.name != "config.yaml" or not (file.parent / "run.json").is_file():
        return []
    return [f"run.dir={json.dumps(str(file.parent.parent))}", f"run.name={json.dumps(file.parent.name)}"]


def find_checkpoint(run_dir: str, step: str) -> CheckpointInfo:
    """A verified checkpoint: `step` is a number or "latest".

    Raises:
        ConfigError: no run there, no checkpoint of that step, or `step` is neither.
        CheckpointError: the checkpoint is damaged, or there is no complete one.
    """
    check_run_dir(run_dir)
    if step == "latest":
        info = checkpoint.latest(run_dir)
        if info is None:
            raise CheckpointError(f"{storage.display(run_dir)} holds no complete checkpoint")
        return info
    if not step.isdecimal():
        raise ConfigError(f"step {step!r} is neither a number nor latest")
    names = storage.list_dir(storage.join(run_dir, "checkpoints"))
    if f"step_{int(step)}" not in names:
        steps = sorted(int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdecimal())
        near = f"; the nearest is {min(steps, key=lambda s: abs(s - int(step)))}" if steps else ""
        raise ConfigError(f"{storage.display(run_dir)} has no checkpoint of step {step}{near}"
                              + (f" (there are {', '.join(map(str, steps))})" if len(steps) > 1 else ""))
    return checkpoint.open_checkpoint(checkpoint.step_dir(run_dir, int(step)))


@contextmanager
def adapter_folder(*, folder: str | None = None, of: CheckpointInfo | None = None, ema: bool = False) -> Iterator[str]:
    """A local folder with an adapter: `folder` (fetched, where it is a URI of an object store), or a checkpoint's."""
    local = storage.local_path(folder) if folder is not None else None
    if local is not None:
        yield str(local)
        return
    with tempfile.TemporaryDirectory(prefix="flowgrpo-adapter-") as spool:
        file = Path(spool) / ADAPTER_FILE
        if of is not None:
            file.write_bytes(checkpoint.read_file(of, f"{'ema' if ema else 'adapter'}/{ADAPTER_FILE}"))
        else:
            uri = storage.join(str(folder), ADAPTER_FILE)
            if storage.size(uri) is None:
                raise ConfigError(f"no adapter in {storage.display(str(folder))}: it has no {ADAPTER_FILE}")
            file.write_bytes(storage.read_bytes(uri))
        yield spool


# Export ---------------------------------------------------------------------------------------------------------------

def export(
    run_dir: str, step: str, *, ema: bool, out: str, format: str = "diffusers", fold_alpha: bool = False,
) -> tuple[str, int]:
    """Write a checkpoint's verified adapter into the folder `out`; returns the file's URI and the step.

    In diffusers' format, and with alpha not folded in, the file is the checkpoint's own. The others are
    called <run>-step<N>[-ema].safetensors.

    Raises:
        ConfigError: no such run, an unknown format, or one that has no name for a layer.
        CheckpointError: no such checkpoint, or a damaged one.
    """
    from flowgrpo_ray.policies.adapter_formats import FORMATS, encode
    from flowgrpo_ray.policies.lora import load_adapter

    if format not in FORMATS:
        raise ConfigError(f"--format {format!r} is unknown{nearest(format, FORMATS)}")
    info = find_checkpoint(run_dir, step)
    local = storage.local_path(out)
    if local is not None and local.is_file():
        raise ConfigError(f"--out {out} is a file; give the folder that the adapter goes into")
    if format == "diffusers" and not fold_alpha:
        data = checkpoint.read_file(info, f"{'ema' if ema else 'adapter'}/{ADAPTER_FILE}")
        return storage.write_bytes(storage.join(out, ADAPTER_FILE), data), info.step
    with adapter_folder(of=info, ema=ema) as folder:
        arrays, settings = load_adapter(folder)
    family = _family(run_dir, arrays) if format == "kohya" else ""
    data = encode(arrays, settings, format, family, fold_alpha=fold_alpha)
    name = f"{storage.base_name(run_dir)}-step{info.step}{'-ema' if ema else ''}.safetensors"
    return storage.write_bytes(
        storage.join(out, ADAPTER_FILE if format == "diffusers" else name), data), info.step


def _family(run_dir: str, arrays: Arrays) -> str:
    """The model's family: by the adapter where only FLUX has such layers, else by the configuration."""
    from flowgrpo_ray.policies.source import find

    if any(".single_transformer_blocks." in key for key in arrays):
        return "flux"
    model = run_config(run_dir).model
    return find(model).family if model.family == "auto" else model.family


def run_config(run_dir: str) -> Config:
    """The configuration that a run directory carries. Raises ConfigError where there is none."""
    uri = storage.join(check_run_dir(run_dir), "config.yaml")
    if storage.size(uri) is None:
        raise ConfigError(f"{storage.display(run_dir)} has no config.yaml")
    with tempfile.TemporaryDirectory(prefix="flowgrpo-config-") as spool:
        file = Path(spool) / "config.yaml"
        file.write_bytes(storage.read_bytes(uri))
        return load(file)


def loading_code(config: Config, out: str) -> str:
    """Python that loads an exported adapter into its stock diffusers pipeline and makes an image."""
    from flowgrpo_ray.policies.source import find

    m, e = config.model, config.eval
    on_hub = not m.path.startswith("builtin:") and not Path(m.path).expanduser().exists()
    source = None if on_hub else find(config.model)  # a hub need not be reachable for this
    loading = [repr(source.location if source else m.path), f"torch_dtype=torch.{m.dtype}"]
    loading += [f"{key}={value!r}" for key, value in (("revision", m.revision), ("variant", m.variant)) if value]
    without_t5 = source is not None and source.family == "sd3" and not source.has("text_encoder_3")
    if without_t5 or not m.use_t5:
        loading.append("text_encoder_3=None, tokenizer_3=None")
    guidance = config.sampling.guidance_scale if e.guidance_scale is None else e.guidance_scale
    call = [f"num_inference_steps={e.num_steps}", f"guidance_scale={guidance:g}", f"height={config.sampling.height}",
            f"width={config.sampling.width}"]
    if m.max_sequence_length:
        call.append(f"max_sequence_length={m.max_sequence_length}")
    return "\n".join([
        "import torch", "from diffusers import DiffusionPipeline", "",
        f"pipe = DiffusionPipeline.from_pretrained({', '.join(loading)})",
        f"pipe.load_lora_weights({out!r})  # the file carries its rank and alpha",
        f"image = pipe('your prompt', {', '.join(call)}).images[0]",
    ])


# Sampling -------------------------------------------------------------------------------------------------------------

def sampling_config(
    config: Config, *, images: int, seed: int, steps: int | None = None, guidance: float | None = None,
    height: int | None = None, width: int | None = None, kernel: str | None = None, noise_level: float | None = None,
) -> Config:
    """`config` with what `flowgrpo-ray sample` was told laid over it; raises ConfigError."""
    tree = config.model_dump(mode="json")
    changes: dict[str, dict[str, Any]] = {
        "eval": {"images_per_prompt": images, "seed": seed, "num_prompts": None, "num_steps": steps,
                 "guidance_scale": guidance},
        "sampling": {"height": height, "width": width, "kernel": kernel, "noise_level": noise_level},
    }
    for section, values in changes.items():
        tree[section] |= {key: value for key, value in values.items() if value is not None or key == "num_prompts"}
    return from_tree(tree)


def image_size(model: ModelConfig, height: int | None, width: int | None) -> tuple[int, int]:
    """(height, width) in pixels: what is given, and for the rest the size that the model was trained at."""
    from flowgrpo_ray import tiny
    from flowgrpo_ray.policies.source import component_config, find, vae_scale_factor

    if model.path == "builtin:tiny":
        own = tiny.IMAGE_SIZE
    else:
        source = find(model)
        vae = component_config(source, model, "vae")
        # The transformer of FLUX does not say; its pipeline makes squares of 1024.
        cells = component_config(source, model, "transformer").get("sample_size") if source.family == "sd3" else 128
        own = ((cells or 128) * vae_scale_factor(vae),) * 2
    return height or own[0], width or own[1]


def sample(
    config: Config, records: Sequence[PromptRecord], out: Path, *, adapter: str | None = None, sde: bool = False,
    floats: bool = False,
) -> Iterator[Path]:
    """Sample `eval.images_per_prompt` images per prompt as an evaluation does, and write them to the folder `out`.

    Noise, shards and encoding are those of an evaluation under `config`, so the images are too, bit for bit on the same
    CPU. Yields the paths: `<prompt>_<image>.png` ([0, 1] float32 [3, H, W] beside it as .npy with `floats`), and
    `grid.png` of the first 64 at last.

    Args:
        adapter: local folder of an adapter in diffusers format; None = the base.
        sde: sample with `sampling.kernel` at every step but the last instead of the ODE.

    Raises:
        ConfigError: a model, adapter or image size that does not fit.
    """
    import numpy as np
    import torch

    from flowgrpo_ray import device as devices
    from flowgrpo_ray.data.plan import noise_seed, plan_evaluation
    from flowgrpo_ray.policies import find, load_policy, lora, policy_class
    from flowgrpo_ray.run_dir.sample_table import GridImage, png_grid
    from flowgrpo_ray.sampling.requests import evaluation_guidance, evaluation_negative, evaluation_request
    from flowgrpo_ray.sampling.sampler import Sampler, encode_png

    device = devices.configure_process(on_gpu=torch.cuda.is_available(), cpu_threads=config.model.cpu_threads)
    policy_class(find(config.model).family).fetch(config.model)
    policy = load_policy(config.model, device=device)
    if adapter is not None:
        lora.attach(policy, LoraSection(init_from=adapter), config.train.seed)
    sampler = Sampler(policy, config)
    out.mkdir(parents=True, exist_ok=True)
    shards = plan_evaluation(config, records)
    cfg = policy.uses_cfg(evaluation_guidance(config))
    negative_of = {shard.shard: evaluation_negative(config, shard) if cfg else None for shard in shards}
    negatives = {text for text in negative_of.values() if text is not None}
    texts = list(dict.fromkeys([*sorted(negatives), *(records[p].prompt for shard in shards for p in shard.prompts)]))
    encoded = dict(zip(texts, sampler.encode_all([PromptRecord(prompt=text) for text in texts]), strict=True))
    digits, made = len(str(max(len(records) - 1, 99))), []
    for shard in shards:
        request = evaluation_request(config, records, shard, run_id="sample", slot="policy", version=0)
        if sde:
            request = replace(request, window=(0, request.num_steps - 1))
        text = negative_of[shard.shard]
        negative = encoded[text] if text is not None else None
        latents, _ = sampler.denoise(request, "", negative,
                                     *(encoded[records[p].prompt] for p in shard.prompts))
        images = sampler.decode(latents, shard.height, shard.width)
        values = None
        if floats:
            values = np.concatenate([part.cpu().numpy() for part in policy.decode_parts(
                latents, shard.height, shard.width, config.sampling.decode_batch)])
        for row, (prompt, image) in enumerate(shard.counted):
            path = out / f"{prompt:0{digits}d}_{image:02d}.png"
            png = encode_png(images[row])
            made.append(GridImage(png, records[prompt].prompt, noise_seed(*request.noise_keys[row], request.stream, -1)))
            path.write_bytes(png)
            yield path
            if values is not None:
                np.save(path.with_suffix(".npy"), values[row])
                yield path.with_suffix(".npy")
    grid = out / "grid.png"
    columns = min(config.eval.images_per_prompt, 8) if config.eval.images_per_prompt > 1 else 6
    grid.write_bytes(png_grid(made[:GRID_IMAGES], columns))
    yield grid
