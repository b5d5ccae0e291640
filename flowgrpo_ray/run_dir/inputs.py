"""What a run reads, by its contents: a name or a path may mean another file at a resume, on another node or in another job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from flowgrpo_ray import storage
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.prompts import location_of
from flowgrpo_ray.policies.source import INDEX_NAME, ModelSource, find, hub_commit

Identity = dict[str, str]  # part of the input -> digest of its contents; the part of a single file is ""

_WHOLE = 64 << 20  # bytes; of a larger file, samples are hashed
_SAMPLES, _SAMPLE = 64, 64 << 10


def identify(config: Config) -> dict[str, Identity]:
    """The identity of every input of a run, by its key in the configuration.

    Prompt files and the starting adapter: sha256. A model folder: a digest of every file that is read of it. A hub model: its
    commit. Reward options that are local files or folders: as for models.

    Raises:
        ConfigError, OSError: an input cannot be read.
    """
    d = config.data
    out = {"data.train_prompts": {"": _sha256(location_of(d.train_prompts))}}
    if d.eval_prompts:
        out["data.eval_prompts"] = {"": _sha256(location_of(d.eval_prompts))}
    if config.lora.init_from is not None:
        from flowgrpo_ray.policies.lora import adapter_file  # here, as it imports torch

        out["lora.init_from"] = {"": _sha256(str(adapter_file(Path(config.lora.init_from))))}
    out["model.path"] = _model(config, find(config.model))
    for key, setting in config.settings().items():
        if key.startswith("rewards.") and setting.is_input and isinstance(setting.value, str):
            path = Path(setting.value)
            if path.exists():  # else the name of a model, or a path that only the reward's own environment has
                out[key] = _folder(path, [path])
    return out


def pin_model(config: Config) -> None:
    """Set `model.revision` of a hub model to the commit that it is now, so that every node loads the same."""
    if not find(config.model).local:
        config.model.revision = hub_commit(config.model)


def _model(config: Config, source: ModelSource) -> Identity:
    if not source.local:
        return {"": f"{config.model.path}@{hub_commit(config.model)}"}
    root = Path(source.location)
    unused = {"image_encoder"} | (set() if config.model.use_t5 else {"text_encoder_3", "tokenizer_3"})
    parts = [root / name for name in sorted(source.index) if source.has(name) and name not in unused]
    return _folder(root, [root / INDEX_NAME, *parts])


def _folder(root: Path, parts: list[Path]) -> Identity:
    return {"" if file == root else file.relative_to(root).as_posix(): _sampled(file) for file in _files(parts)}


def _files(parts: list[Path]) -> Iterator[Path]:
    for part in parts:
        found = [part] if part.is_file() else sorted(part.rglob("*"))
        yield from (file for file in found if file.is_file() and not any(
            name.startswith((".", "__pycache__")) for name in file.relative_to(part.parent).parts[1:]))


def _sampled(file: Path) -> str:
    """Digest of a file: of all its bytes, or of the size and 64 evenly spaced pieces of a large one (weights of gigabytes that
    were trained further differ in every piece)."""
    size = file.stat().st_size
    if size <= _WHOLE:
        return _sha256(str(file))
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as stream:
        for i in range(_SAMPLES):
            stream.seek(i * (size - _SAMPLE) // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE))
    return f"sampled:{digest.hexdigest()}"


def _sha256(uri: str) -> str:
    return f"sha256:{storage.sha256(uri)}"
