"""The adapter: LoRA layers by peft, their state as plain arrays, and adapter files in diffusers format.

The one rule for dtypes: LoRA weights are float32 whatever the dtype of the base. peft's forward then casts the layer's
input to float32, multiplies by A and B in float32, adds that to the base layer's output, and casts the sum back to the
base dtype: `y = (W x + (alpha / r) B A x.float()).to(base dtype)`. Sampler and learner run this same code, without
autocast. (On CUDA the process setting `torch.set_float32_matmul_precision("high")`, made for every actor, lets these
products use TF32, on both sides alike.)

Keys are those of diffusers' adapter files: `transformer.transformer_blocks.0.attn.to_q.lora_A.weight`, that is the name
in `policy.modules`, the path of the layer, and no adapter name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from flowgrpo_ray.config.schema import LoraSection
from flowgrpo_ray.errors import ConfigError, SyncError, nearest

if TYPE_CHECKING:
    from flowgrpo_ray.policies.base import Policy

ADAPTER = "default"
WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
METADATA_KEY = "lora_adapter_metadata"
# Names that torch's wrappers put into a path (activation checkpointing, torch.compile).
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
_KEY = re.compile(r"(?P<module>[^.]+)\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter is: rank r, alpha (its output is scaled by alpha / r), and the endings of the layers it is on."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def attach(policy: Policy, lora: LoraSection, seed: int) -> LoraSettings:
    """Put a LoRA on the policy's blocks; only its weights require a gradient afterwards.

    Each A is drawn from N(0, 1/r^2), each B is 0, so that the adapter starts as the identity. The draw depends on the
    seed and the layer's name alone: not on the device, the dtype, or torch's global generator, which is left as it was.
    With `lora.init_from` rank, alpha, layers and weights are those of that adapter.

    Raises:
        ConfigError: a target that matches no linear layer inside a block, or an adapter that is not for this model or
            contradicts the rest of the section.
    """
    if parameters(policy):
        raise RuntimeError("this policy has a LoRA already")
    arrays: dict[str, np.ndarray] | None = None
    if lora.init_from is not None:
        arrays, settings = load_adapter(lora.init_from)
        layers = _layers_of_adapter(policy, arrays, lora.init_from)
        _check_agrees(policy, lora, settings, layers)
    else:
        rank = lora.rank or policy.default_rank
        settings = LoraSettings(rank, float(lora.alpha or 2 * rank), tuple(lora.targets or policy.default_targets))
        if lora.targets is not None and not lora.targets:
            raise ConfigError("lora.targets is empty; leave it out for the family's own targets "
                              f"({', '.join(policy.default_targets)})")
        layers = _layers_of_targets(policy, settings.targets)
    _inject(policy, settings, layers)
    live = parameters(policy)
    if arrays is None:
        arrays = {key: _initial(key, tuple(param.shape), settings.rank, seed) for key, param in live.items()}
    _check_shapes(live, arrays, lora.init_from)
    for key, param in live.items():
        param.data = torch.from_numpy(arrays[key]).to(param.device, torch.float32, copy=True)
        param.requires_grad_(True)
    return settings


def parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """The live LoRA weights by key, sorted; empty before `attach`."""
    found = {}
    for name, module in policy.modules.items():
        for path, param in module.named_parameters():
            if f".{ADAPTER}." in path and ("lora_A." in path or "lora_B." in path):
                found[f"{name}.{_WRAPPERS.sub('', path).replace(f'.{ADAPTER}.', '.')}"] = param
    return dict(sorted(found.items()))


def read_state(policy: Policy) -> dict[str, np.ndarray]:
    """Float32 copies of the LoRA weights on the CPU, by key, sorted."""
    return {
        key: np.array(param.detach().to("cpu", torch.float32).numpy(), copy=True)
        for key, param in parameters(policy).items()
    }


@torch.no_grad()
def write_state(policy: Policy, arrays: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Copy arrays into the live LoRA weights, in place.

    Returns:
        (bound, changed): weights that were matched and copied, and those of them whose bytes became others.

    Raises:
        SyncError: a key is missing, unknown, or of another shape or dtype; nothing was copied then.
    """
    live = parameters(policy)
    missing, unknown = sorted(live.keys() - arrays.keys()), sorted(arrays.keys() - live.keys())
    if missing or unknown:
        raise SyncError(f"the adapter does not fit this policy: {len(missing)} weights of {len(live)} are missing"
                        f"{_first(missing)} and {len(unknown)} are unknown{_first(unknown)}")
    for key, param in live.items():
        array = arrays[key]
        if tuple(array.shape) != tuple(param.shape) or array.dtype != np.float32:
            raise SyncError(f"the adapter does not fit this policy: {key} is {array.dtype} {tuple(array.shape)}, and "
                            f"the policy holds float32 {tuple(param.shape)}")
    changed = 0
    for key, param in live.items():
        new = torch.from_numpy(np.array(arrays[key], copy=True, order="C")).to(param.device)
        changed += _bytes_differ(param.detach(), new)
        param.copy_(new)
    return len(live), changed


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 (hexadecimal) over the sorted (key, shape, dtype, bytes)."""
    total = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        total.update(f"{key}\0{tuple(array.shape)}\0{array.dtype.str}\0".encode())
        total.update(array.tobytes())
    return total.hexdigest()


@contextlib.contextmanager
def disabled(policy: Policy) -> Iterator[None]:
    """The adapter is off inside: the policy is the base model, which is the reference of the KL term.

    It may stand between a forward and its backward.
    """
    layers = list(_lora_layers(policy))
    before = [layer.disable_adapters for layer in layers]
    # peft's enable_adapters() would also flip requires_grad, which FSDP2 reads when it first gathers a parameter.
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled


def save_adapter(
    directory: str | Path, arrays: Mapping[str, np.ndarray], settings: LoraSettings, policy_or_pipeline_class: Any
) -> Path:
    """Write an adapter that `pipeline.load_lora_weights(directory)` restores with its rank, its alpha and every key.

    Without the metadata in the file diffusers would take alpha = r, and apply the adapter at a wrong scale, silently.

    Returns:
        the path of the file.

    Raises:
        ConfigError: `directory` is a file.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"cannot write an adapter into {directory}: it is a file, not a folder")
    pipeline_class = getattr(policy_or_pipeline_class, "pipeline_class", policy_or_pipeline_class)
    by_module: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    layers: dict[str, set[str]] = defaultdict(set)
    for key in sorted(arrays):
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"{key} is not the key of a LoRA weight")
        name = match["module"]
        by_module[name][key.removeprefix(f"{name}.")] = torch.from_numpy(np.array(arrays[key], copy=True, order="C"))
        layers[name].add(match["layer"])
    arguments: dict[str, Any] = {}
    for name, weights in by_module.items():
        arguments[f"{name}_lora_layers"] = weights
        arguments[f"{name}_lora_adapter_metadata"] = {
            "r": settings.rank, "lora_alpha": _plain(settings.alpha), "lora_dropout": 0.0, "bias": "none",
            # Whole paths, not endings: `proj_out` would also match a layer outside the blocks.
            "target_modules": sorted(layers[name]),
        }
    pipeline_class.save_lora_weights(str(directory), weight_name=WEIGHTS_NAME, **arguments)
    _sort_header(directory / WEIGHTS_NAME)
    return directory / WEIGHTS_NAME


def _sort_header(file: Path) -> None:
    """Write the file's header with its keys in order: safetensors writes the metadata in the order of a hash that differs
    from process to process, and equal adapters should be equal files."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # the format aligns the tensors
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def load_adapter(directory: str | Path) -> tuple[dict[str, np.ndarray], LoraSettings]:
    """Read an adapter in diffusers format: float32 arrays by key, and its settings (targets are whole layer paths).

    Raises:
        ConfigError: no adapter there, an adapter without metadata, or one that is no plain LoRA of one rank.
    """
    from safetensors import SafetensorError, safe_open

    file = adapter_file(Path(directory))
    try:
        with safe_open(str(file), framework="pt", device="cpu") as stored:
            header = stored.metadata() or {}
            arrays = {key: stored.get_tensor(key).float().numpy() for key in sorted(stored.keys())}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"adapter {file} is not a readable safetensors file: {error}") from error
    if METADATA_KEY not in header:
        raise ConfigError(
            f"adapter {file} carries no adapter metadata ({METADATA_KEY}), so its alpha is not known and its scale "
            "alpha / r would be wrong; write it again with diffusers' save_lora_weights(..., "
            "transformer_lora_adapter_metadata=...)")
    odd = [key for key in arrays if _KEY.fullmatch(key) is None]
    if odd or not arrays:
        raise ConfigError(f"adapter {file} is no LoRA in diffusers' format: its keys should look like "
                          f"transformer.<layer>.lora_A.weight{_first(odd)}")
    return arrays, _settings_of(arrays, json.loads(header[METADATA_KEY]), file)


def _settings_of(arrays: Mapping[str, np.ndarray], metadata: dict[str, Any], file: Path) -> LoraSettings:
    scales = set()
    for name in {key.split(".", 1)[0] for key in arrays}:
        rank, alpha = metadata.get(f"{name}.r"), metadata.get(f"{name}.lora_alpha")
        if rank is None or alpha is None:
            raise ConfigError(f"adapter {file}: its metadata lack r or lora_alpha of {name}, so its scale is not known")
        for option in ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"):
            if metadata.get(f"{name}.{option}"):
                raise ConfigError(f"adapter {file} uses {option}; only plain LoRA with one rank and alpha is supported")
        scales.add((int(rank), float(alpha)))
    if len(scales) != 1:
        raise ConfigError(f"adapter {file} has several ranks or alphas ({sorted(scales)}); only one is supported")
    rank, alpha = scales.pop()
    layers: dict[str, set[str]] = defaultdict(set)
    for key, array in arrays.items():
        match = _parsed(key)
        layers[match["layer"]].add(match["side"])
        if array.ndim != 2 or array.shape[0 if match["side"] == "A" else 1] != rank:
            raise ConfigError(f"adapter {file}: {key} is {array.shape}, which is not of rank {rank}")
    half = [layer for layer, sides in layers.items() if len(sides) < 2]
    if half:
        raise ConfigError(f"adapter {file}: {half[0]} has only one of lora_A and lora_B")
    return LoraSettings(rank, alpha, tuple(sorted(layers)))


def adapter_file(path: Path) -> Path:
    """The weight file of an adapter: a folder's, or the path itself; raises ConfigError where there is none."""
    path = path.expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        siblings = [str(p) for p in path.parent.glob("*") if p.is_dir()] if path.parent.is_dir() else []
        raise ConfigError(f"no adapter at {path}: there is no such folder{nearest(str(path), siblings)}")
    if not (path / WEIGHTS_NAME).is_file():
        raise ConfigError(f"no adapter in {path}: it has no {WEIGHTS_NAME}"
                          f"{nearest(WEIGHTS_NAME, sorted(p.name for p in path.iterdir()))}")
    return path / WEIGHTS_NAME


def _linear_layers(policy: Policy, name: str) -> dict[str, str]:
    """Linear layers inside the blocks of one module, in the module's order: path -> path within the block."""
    return {
        f"{block_path}.{path}": path
        for block_path, block in policy.modules[name].named_modules() if type(block).__name__ in policy.blocks
        for path, layer in block.named_modules() if isinstance(layer, nn.Linear)
    }


def _layers_of_targets(policy: Policy, targets: Sequence[str]) -> dict[str, list[str]]:
    """Which layers of each module the targets name: those whose path is a target or ends in `.target`."""
    available = {name: _linear_layers(policy, name) for name in policy.modules}
    for target in targets:
        if not any(_ends_in(path, target) for paths in available.values() for path in paths):
            endings = sorted({ending for paths in available.values() for ending in paths.values()})
            raise ConfigError(f"lora.targets: no linear layer inside {' or '.join(policy.blocks)} ends in {target!r}"
                              f"{nearest(target, endings)}")
    return {name: [path for path in paths if any(_ends_in(path, target) for target in targets)]
            for name, paths in available.items()}


def _layers_of_adapter(policy: Policy, arrays: Mapping[str, np.ndarray], origin: str) -> dict[str, list[str]]:
    wanted: dict[str, set[str]] = defaultdict(set)
    for key in arrays:
        match = _parsed(key)
        wanted[match["module"]].add(match["layer"])
    for name, layers in wanted.items():
        if name not in policy.modules:
            raise ConfigError(f"lora.init_from {origin} is not for this model: it has weights of {name}"
                              f"{nearest(name, policy.modules)}")
        available = _linear_layers(policy, name)
        foreign = sorted(layers - set(available))
        if foreign:
            raise ConfigError(f"lora.init_from {origin} is not for this model: {len(foreign)} of its {len(layers)} "
                              f"layers are not in it, for example {foreign[0]}{nearest(foreign[0], available)}")
    return {name: [path for path in _linear_layers(policy, name) if path in wanted[name]] for name in policy.modules}


def _check_agrees(policy: Policy, lora: LoraSection, saved: LoraSettings, layers: dict[str, list[str]]) -> None:
    """The section's other fields, where given, must say what the adapter is."""
    for field, asked, has in (("rank", lora.rank, saved.rank), ("alpha", lora.alpha, saved.alpha)):
        if asked is not None and asked != has:
            raise ConfigError(f"lora.{field} is {asked:g}, but the adapter of lora.init_from has {has:g}; leave it out")
    if lora.targets is not None and _layers_of_targets(policy, lora.targets) != layers:
        raise ConfigError("lora.targets names other layers than the adapter of lora.init_from has; leave it out")


def _check_shapes(live: Mapping[str, nn.Parameter], arrays: Mapping[str, np.ndarray], origin: str | None) -> None:
    for key, param in live.items():
        if tuple(arrays[key].shape) != tuple(param.shape):
            raise ConfigError(f"lora.init_from {origin} is not for this model: {key} is {tuple(arrays[key].shape)}, "
                              f"and the model needs {tuple(param.shape)}")


def _parsed(key: str) -> re.Match[str]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is not the name of a LoRA weight")
    return match


def _inject(policy: Policy, settings: LoraSettings, layers: dict[str, list[str]]) -> None:
    from peft import LoraConfig

    for name, module in policy.modules.items():
        if not layers[name]:
            continue
        config = LoraConfig(r=settings.rank, lora_alpha=_plain(settings.alpha), target_modules=layers[name],
                            lora_dropout=0.0, bias="none", init_lora_weights=False)
        with torch.random.fork_rng(devices=[]):  # constructing the layers would advance the global generator
            transformer: Any = module  # with peft's mixin of diffusers
            transformer.add_adapter(config, adapter_name=ADAPTER)
        module.eval()


def _initial(key: str, shape: tuple[int, ...], rank: int, seed: int) -> np.ndarray:
    if key.endswith(".lora_B.weight"):
        return np.zeros(shape, np.float32)
    number = int.from_bytes(hashlib.sha256(f"lora/{seed}/{key}".encode()).digest()[:8], "big") & (2**63 - 1)
    generator = torch.Generator("cpu").manual_seed(number)
    return (torch.randn(shape, generator=generator, dtype=torch.float32) / rank).numpy()


def _lora_layers(policy: Policy) -> Iterator[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in policy.modules.values():
        yield from (layer for layer in module.modules() if isinstance(layer, BaseTunerLayer))


def _bytes_differ(old: torch.Tensor, new: torch.Tensor) -> bool:
    return not torch.equal(old.contiguous().view(torch.int32), new.contiguous().view(torch.int32))


def _ends_in(path: str, ending: str) -> bool:
    return path == ending or path.endswith(f".{ending}")


def _plain(alpha: float) -> int | float:
    return int(alpha) if math.isfinite(alpha) and float(alpha).is_integer() else alpha


def _first(keys: Sequence[str]) -> str:
    return f" (for example {keys[0]})" if keys else ""
