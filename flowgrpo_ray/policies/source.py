"""Where a base model comes from and which family it is, found out without loading a weight or importing diffusers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo_ray import hub, waiting
from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.errors import ConfigError, DeadlineError, first_line, nearest

PIPELINE_FAMILIES = {"StableDiffusion3Pipeline": "sd3", "FluxPipeline": "flux"}
CFG_FAMILIES = ("sd3",)  # of the others guidance is an input of the model
BUILTIN_MODELS = ("builtin:tiny",)
INDEX_NAME = "model_index.json"
LONGEST_SEQUENCE = 512  # the pipelines of both families refuse a longer T5 sequence
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelSource:
    """A diffusers pipeline that was found: `location` is a folder or a hub name, `index` its model_index.json."""

    location: str
    family: str
    index: dict[str, Any]
    local: bool

    def has(self, component: str) -> bool:
        """Whether the pipeline carries a component: [null, null] in the index means that it does not."""
        entry = self.index.get(component)
        return isinstance(entry, (list, tuple)) and entry[0] is not None


def uses_cfg(family: str, guidance: float) -> bool:
    """Whether a family runs a CFG pass, which needs the negative conditioning: only above a scale of 1, as the stock does."""
    return family in CFG_FAMILIES and guidance > 1


def check_model(model: ModelConfig) -> ModelSource:
    """Check that the base model can be reached and is of a known family; loads no weight.

    For a hub name only `model_index.json` is fetched (or found in the hub's cache). Of a local folder the weight files
    are looked at too: present, and of the length that their headers say.

    Raises:
        ConfigError: no such folder, a folder that is no diffusers pipeline or lacks weights, an unknown family, or an
            unreachable hub.
    """
    source = find(model)
    if source.local:
        unused = {"image_encoder"} | (set() if model.use_t5 else {"text_encoder_3"})
        for name in sorted(source.index.keys() - unused):
            folder = Path(source.location) / name
            if source.has(name) and (folder / "config.json").is_file():  # a network, not a tokenizer or scheduler
                _check_weights(model, folder)
    return source


def component_config(source: ModelSource, model: ModelConfig, name: str, file: str = "config.json") -> dict[str, Any]:
    """config.json (or another file) of a component, of a folder or of the hub; raises ConfigError if it cannot be read."""
    file = f"{name}/{file}"
    try:
        text = (Path(source.location) / file).read_text(encoding="utf-8") if source.local else _fetch(model, file)
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise ValueError(f"it holds a {type(tree).__name__}, not a mapping")
        return tree
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {model.path!r}: {file} cannot be read: {type(error).__name__}: {error}") from None


def vae_scale_factor(vae: Any) -> int:
    """Pixels per latent cell along each side, of the configuration of an AutoencoderKL. Raises KeyError."""
    return 2 ** (len(vae["block_out_channels"]) - 1)


def _check_weights(model: ModelConfig, folder: Path) -> None:
    """A network's folder has weight files (all shards that its index names), and safetensors files are whole."""
    from safetensors import SafetensorError, safe_open

    where = f"model.path {model.path!r}"
    marks = ([f".{model.variant}"] if model.variant else []) + [""]
    stems = ("diffusion_pytorch_model", "model", "pytorch_model")
    names = [f"{stem}{mark}.{ending}" for mark in marks for stem in stems for ending in ("safetensors", "bin")]
    files = [folder / name for name in names if (folder / name).is_file()][:1]
    if not files:
        indices = sorted(folder.glob("*.index*.json"))
        if not indices:
            raise ConfigError(f"{where}: there are no weights in {folder} (looked for {names[0]} and the like)")
        try:
            shards = sorted(set(json.loads(indices[0].read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{where}: {indices[0]} cannot be read: {type(error).__name__}: {error}") from None
        files = [folder / name for name in shards]
        if absent := [file.name for file in files if not file.is_file()]:
            raise ConfigError(f"{where}: {folder} lacks {', '.join(absent)}, which {indices[0].name} names")
    for file in files:
        if file.suffix == ".safetensors":
            try:
                with safe_open(str(file), framework="numpy"):
                    pass
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{where}: {file} is damaged: {error}") from None


def check_size(height: int, width: int, multiple: int, largest: int | None = None) -> None:
    """Raise ConfigError unless both sides (pixels) are multiples, and at most `largest`."""
    for name, value in (("height", height), ("width", width)):
        near = max(multiple, round(value / multiple) * multiple)
        if largest is not None:
            near = min(near, largest // multiple * multiple)
        if value < 1 or value % multiple or (largest is not None and value > largest):
            limit = f" up to {largest}" if largest is not None else ""
            raise ConfigError(f"image {name} is {value} pixels; this model makes multiples of {multiple}{limit}, "
                              f"and the nearest is {near}")


def find(model: ModelConfig) -> ModelSource:
    """Resolve `model.path` and its family; raises ConfigError as `check_model` does."""
    location, text, local = _read_index(model)
    where = f"model.path {model.path!r}"
    try:
        index = json.loads(text)
        if not isinstance(index, dict):
            raise ValueError(f"it holds a {type(index).__name__}, not a mapping")
    except ValueError as error:
        raise ConfigError(f"{where}: its {INDEX_NAME} is not valid JSON: {error}") from None
    source = ModelSource(location, _family(model, index, where), index, local)
    if local:
        folders = [name for name in index if source.has(name) and not (Path(location) / name).is_dir()]
        if folders:
            raise ConfigError(f"{where}: {INDEX_NAME} names {', '.join(folders)}, and {location} has no such folder")
    if model.max_sequence_length is not None and model.max_sequence_length > LONGEST_SEQUENCE:
        raise ConfigError(f"model.max_sequence_length is {model.max_sequence_length}; "
                          f"the longest is {LONGEST_SEQUENCE}")
    return source


def _family(model: ModelConfig, index: dict[str, Any], where: str) -> str:
    name = str(index.get("_class_name"))
    family = PIPELINE_FAMILIES.get(name)
    if family is None:
        known = ", ".join(f"{pipeline} ({short})" for pipeline, short in PIPELINE_FAMILIES.items())
        raise ConfigError(f"{where} is a {name}, which is not a supported family; the supported pipelines are {known}")
    if model.family not in ("auto", family):
        raise ConfigError(f"model.family is {model.family!r}, but {where} is a {name}: "
                          f"set model.family to {family} or auto")
    return family


def _read_index(model: ModelConfig) -> tuple[str, str, bool]:
    """(location, text of model_index.json, whether it is a local folder)."""
    path = model.path
    if path.startswith("builtin:"):
        if path not in BUILTIN_MODELS:
            raise ConfigError(f"model.path: no model is named {path!r}{nearest(path, BUILTIN_MODELS)}")
        from flowgrpo_ray import tiny

        folder = Path(tiny.model_dir())
    else:
        folder = Path(path).expanduser()
    if folder.is_dir():
        file = folder / INDEX_NAME
        if not file.is_file():
            raise ConfigError(f"model.path {path!r} is a folder without {INDEX_NAME}, so it is not a diffusers pipeline"
                              f"{_nested(folder)}")
        return str(folder), file.read_text(encoding="utf-8"), True
    if folder.exists():
        raise ConfigError(f"model.path {path!r} is a file; give the folder of a diffusers pipeline, the one that holds "
                          f"{INDEX_NAME}")
    if not _HUB_NAME.fullmatch(path):
        siblings = [str(p) for p in folder.parent.glob("*") if p.is_dir()] if folder.parent.is_dir() else []
        raise ConfigError(f"model.path {path!r}: there is no such folder, and it is not of the form owner/name of a "
                          f"hub model{nearest(str(folder), siblings)}")
    return path, _fetch(model, INDEX_NAME), False


def hub_commit(model: ModelConfig) -> str:
    """The commit that a hub model's revision (default: main) is now; raises ConfigError as `check_model` does."""
    from huggingface_hub import try_to_load_from_cache

    def cached() -> str | None:
        file = try_to_load_from_cache(model.path, INDEX_NAME, revision=model.revision)
        return Path(file).parent.name if isinstance(file, str) else None  # <cache>/snapshots/<commit>/model_index.json

    return cached() or (_fetch(model, INDEX_NAME) and cached()) or str(model.revision or "main")


def _nested(folder: Path) -> str:
    """Points at a pipeline one level up or down, the usual slip."""
    if (folder.parent / INDEX_NAME).is_file():
        return f"; did you mean {folder.parent}?"
    found = sorted(str(file.parent) for file in folder.glob(f"*/{INDEX_NAME}"))
    return f"; did you mean {found[0]}?" if found else ""


def _fetch(model: ModelConfig, name: str) -> str:
    """Text of a small file of a hub model; raises ConfigError that says why there is none."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    where = f"model.path {model.path!r}"

    def fetch() -> str:
        cached = try_to_load_from_cache(model.path, name, revision=model.revision)
        if not isinstance(cached, str) and not constants.HF_HUB_OFFLINE:
            # The download would try an unreachable hub five times over, half a minute long; this asks once.
            get_hf_file_metadata(hf_hub_url(model.path, name, revision=model.revision))
        return hf_hub_download(model.path, name, revision=model.revision)

    try:
        with hub.explained(where, model.path, model.revision,
                           f"the hub model has no {name}, so it is not a diffusers pipeline"):
            file = waiting.bounded(fetch, f"{name} of {model.path} from the Hugging Face Hub",
                                   waiting.limits.hub, setting="run.hub_timeout_s")
    except DeadlineError as error:  # of a file this small: the hub does not answer
        raise hub.unreachable(where, f"answered {first_line(error)}") from error
    return Path(file).read_text(encoding="utf-8")
