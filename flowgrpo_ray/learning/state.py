"""The learner's files of a checkpoint: adapter and EMA adapter in diffusers format, optimizer, counters."""

from __future__ import annotations

import json
import tempfile
from typing import Any

from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.policies.lora import LoraSettings, save_adapter
from flowgrpo_ray.run_dir import checkpoint

ADAPTER_FILE = "pytorch_lora_weights.safetensors"


def write_learner_state(
    step_uri: str, tensors: dict[str, Arrays], counters: dict[str, Any], settings: LoraSettings, policy_class: Any
) -> list[checkpoint.FileEntry]:
    """Write what `Learner.state` returned into a checkpoint folder (not committed yet)."""
    files = {
        "optimizer.safetensors": checkpoint.tensors_to_bytes(tensors["optimizer"]),
        "learner.json": json.dumps(counters).encode(),
    }
    for name in ("adapter", "ema"):
        files[f"{name}/{ADAPTER_FILE}"] = adapter_bytes(tensors[name], settings, policy_class)
    return checkpoint.write_files(step_uri, files)


def adapter_bytes(arrays: Arrays, settings: LoraSettings, policy_class: Any) -> bytes:
    """An adapter file in diffusers format, its metadata (r, alpha) included."""
    with tempfile.TemporaryDirectory() as folder:
        return save_adapter(folder, arrays, settings, policy_class).read_bytes()


def read_learner_state(step_uri: str) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """What `Learner.load_state` takes, from a committed checkpoint.

    Raises:
        CheckpointError: a file is missing or is not what was committed.
    """
    info = checkpoint.open_checkpoint(step_uri)
    names = {"optimizer": "optimizer.safetensors", **{name: f"{name}/{ADAPTER_FILE}" for name in ("adapter", "ema")}}
    tensors = {key: checkpoint.bytes_to_tensors(checkpoint.read_file(info, file))[0] for key, file in names.items()}
    return tensors, json.loads(checkpoint.read_file(info, "learner.json"))
