"""Durable state: `checkpoints/step_N/` holds files of tensors and, written last, `state.json`, the commit token.

The token names every file with its size and sha256. A folder without one, or with one that does not describe what is
there, is no checkpoint: a crash at any point of the writing leaves the checkpoint before it the newest. Files are
written where the tensors are (a learner rank); the driver commits. safetensors and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as _load_safetensors
from safetensors.numpy import save as _save_safetensors

from flowgrpo_ray import storage
from flowgrpo_ray.errors import CheckpointError, nearest

FORMAT_VERSION = 1
TOKEN = "state.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint: name relative to its folder (with / for folders inside), bytes, hex sha256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint; `step` = committed training steps that it holds the state after."""

    uri: str
    run_id: str
    step: int
    result_hash: str
    files: tuple[FileEntry, ...]
    state: dict[str, Any]

    @property
    def run_dir(self) -> str:
        """The run directory that holds it: <run dir>/checkpoints/step_N."""
        return storage.parent(self.uri, 2)


def step_dir(run_dir: str, step: int) -> str:
    """URI of the checkpoint of a step."""
    return storage.join(run_dir, "checkpoints", f"step_{step}")


def write_files(step_dir_uri: str, files: Mapping[str, bytes]) -> list[FileEntry]:
    """Write files of a checkpoint that is not committed yet, and say what was written.

    A token from an earlier life of the same step is removed first: from here on the folder is no checkpoint. Several
    processes may write different files into one folder; all have to be done before `commit`.

    Raises:
        CheckpointError: a name leaves the folder or is the token's.
    """
    for name in files:
        _check_name(step_dir_uri, name)
    storage.delete_file(storage.join(step_dir_uri, TOKEN))
    entries = []
    for name, data in files.items():
        storage.write_bytes(storage.join(step_dir_uri, name), data)
        entries.append(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()))
    return entries


def commit(
    step_dir_uri: str, entries: Iterable[FileEntry], state: Mapping[str, Any], *, run_id: str, step: int,
    result_hash: str,
) -> CheckpointInfo:
    """Write the token: with it the folder is a checkpoint. `state` is any tree of JSON values (finite numbers).

    Raises:
        CheckpointError: a file is not there or has another size, a name comes twice, or `state` is no JSON.
    """
    entries = sorted(entries, key=lambda entry: entry.name)
    names = [entry.name for entry in entries]
    for name in names:
        _check_name(step_dir_uri, name)
        if names.count(name) > 1:
            raise _broken(step_dir_uri, f"{name} is listed twice, written by two processes")
    info = CheckpointInfo(step_dir_uri, run_id, step, result_hash, tuple(entries), _plain(state, "state"))
    for entry in entries:
        _check_size(info, entry)
    body = {"format": FORMAT_VERSION, "run_id": run_id, "step": step, "result_hash": result_hash,
            "files": [asdict(entry) for entry in entries], "state": info.state}
    token = {**body, "sha256": _token_digest(body)}
    storage.write_bytes(storage.join(step_dir_uri, TOKEN), json.dumps(token, indent=1).encode())
    return info


def open_checkpoint(uri: str) -> CheckpointInfo:
    """The checkpoint at `uri`, every byte of it verified.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    info = _read_token(uri)
    for entry in info.files:
        _check_size(info, entry)
        found = storage.sha256(storage.join(uri, entry.name))
        if found != entry.sha256:
            raise _changed(uri, entry, found)
    return info


def latest(run_dir: str, run_id: str | None = None) -> CheckpointInfo | None:
    """The newest complete checkpoint of a run directory (of run `run_id`, if given); None where there is none.

    Folders that are no checkpoint are skipped, each with a warning that says why.
    """
    for step in sorted(_steps(run_dir), reverse=True):
        try:
            info = open_checkpoint(step_dir(run_dir, step))
            if run_id is not None:
                check_run(info, run_id)
            return info
        except CheckpointError as error:
            log.warning("skipped: %s", error)
    return None


def read_file(info: CheckpointInfo, name: str) -> bytes:
    """One file of a checkpoint, verified.

    Raises:
        CheckpointError: the checkpoint has no such file, or it is not what was committed.
    """
    entry = next((entry for entry in info.files if entry.name == name), None)
    if entry is None:
        raise CheckpointError(f"{storage.display(info.uri)} holds no file {name!r}"
                              f"{nearest(name, [entry.name for entry in info.files])}")
    _check_size(info, entry)
    data = storage.read_bytes(storage.join(info.uri, name))
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise _changed(info.uri, entry, found)
    return data


def prune(run_dir: str, keep: int) -> list[int]:
    """Delete all but the newest `keep` checkpoints and return the steps deleted.

    Folders that are no checkpoint do not count, and those newer than the oldest one kept are left alone (one may be in
    the making). The token goes first: a checkpoint that is half deleted is none.
    """
    if keep < 1:
        raise CheckpointError(f"prune(keep={keep}) would leave no checkpoint; use 1")
    whole = []
    for step in sorted(_steps(run_dir), reverse=True):
        try:
            info = _read_token(step_dir(run_dir, step))
            for entry in info.files:
                _check_size(info, entry)
            whole.append(step)
        except CheckpointError:
            continue  # not a checkpoint, so it does not count; `latest` is what names it
        if len(whole) == keep:
            break
    if len(whole) < keep:
        return []
    old = sorted(step for step in _steps(run_dir) if step < whole[-1])
    for step in old:
        storage.delete_file(storage.join(step_dir(run_dir, step), TOKEN))
        storage.delete_dir(step_dir(run_dir, step))
    return old


def tensors_to_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Arrays (any shape and NumPy dtype that safetensors knows) and string metadata as one safetensors file."""
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    return _save_safetensors(arrays, metadata=dict(metadata) if metadata else None)


def bytes_to_tensors(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays (own, writable copies) and metadata of a safetensors file. Raises CheckpointError."""
    try:
        arrays = {name: np.array(array) for name, array in _load_safetensors(data).items()}
    except SafetensorError as error:
        raise CheckpointError(f"not a safetensors file: {error}") from None
    (length,) = struct.unpack("<Q", data[:8])
    return arrays, json.loads(data[8 : 8 + length]).get("__metadata__", {})


def _steps(run_dir: str) -> list[int]:
    names = storage.list_dir(storage.join(run_dir, "checkpoints"))
    return [int(name[5:]) for name in names if re.fullmatch(r"step_(0|[1-9]\d*)", name)]


def _read_token(uri: str) -> CheckpointInfo:
    token_uri = storage.join(uri, TOKEN)
    if storage.size(token_uri) is None:
        raise _broken(uri, f"{TOKEN} is missing, so the writing was never finished (or the place is wrong)")
    try:
        token = json.loads(storage.read_bytes(token_uri))
        digest = token.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _broken(uri, f"{TOKEN} is damaged ({type(error).__name__}: {error})") from None
    if _token_digest(token) != digest:
        raise _broken(uri, f"{TOKEN} is damaged: its content does not match its own sha256")
    if token["format"] != FORMAT_VERSION:
        raise _broken(uri, f"{TOKEN} has format {token['format']}, this version reads format {FORMAT_VERSION}")
    named = re.fullmatch(r"step_(\d+)", storage.base_name(uri))
    if named and int(named[1]) != token["step"]:
        raise _broken(uri, f"{TOKEN} is of step {token['step']}, so the folder was renamed or copied over")
    files = tuple(FileEntry(**entry) for entry in token["files"])
    return CheckpointInfo(uri, token["run_id"], token["step"], token["result_hash"], files, token["state"])


def _token_digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_name(uri: str, name: str) -> None:
    parts = name.split("/")
    if name == TOKEN or any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{storage.display(uri)}: {name!r} is not a name that a file of a checkpoint can have")


def _check_size(info: CheckpointInfo, entry: FileEntry) -> None:
    size = storage.size(storage.join(info.uri, entry.name))
    if size is None:
        raise _broken(info.uri, f"{entry.name} is missing")
    if size != entry.size:
        kind = "truncated" if size < entry.size else "too long"
        raise _broken(info.uri, f"{entry.name} is {kind}: {size} bytes where {entry.size} were written")


def check_run(info: CheckpointInfo, run_id: str) -> None:
    """Raise CheckpointError for a checkpoint of another run."""
    if info.run_id != run_id:
        raise CheckpointError(f"{storage.display(info.uri)} is of run {info.run_id!r}, not of run {run_id!r}")


def _broken(uri: str, what: str) -> CheckpointError:
    return CheckpointError(f"{storage.display(uri)} is not a checkpoint: {what}")


def _changed(uri: str, entry: FileEntry, found: str) -> CheckpointError:
    return _broken(uri, f"{entry.name} is not what was written: its sha256 is {found[:12]}…, not {entry.sha256[:12]}…")


def _plain(value: Any, path: str) -> Any:
    """`value` as JSON gives it back; what JSON would change or refuse is an error that names the place."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has the key {key!r}; keys of the state are strings")
        return {key: _plain(child, f"{path}.{key}") for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child, f"{path}[{i}]") for i, child in enumerate(value)]
    if value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value)):
        return value
    raise CheckpointError(f"{path} is {value!r}, a {type(value).__name__}; a state holds JSON values (finite numbers)")
