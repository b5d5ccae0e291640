"""What a resume may change: the checkpoint's settings and inputs against the present ones."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo_ray import storage
from flowgrpo_ray.config import Config, yaml12
from flowgrpo_ray.config.schema import RESULT
from flowgrpo_ray.config.settings import Change, changes, flat
from flowgrpo_ray.errors import CheckpointError, ConfigError, ResumeError, nearest
from flowgrpo_ray.run_dir.checkpoint import CheckpointInfo

if TYPE_CHECKING:
    from flowgrpo_ray.run_dir.inputs import Identity

_FILES_SHOWN = 5


@dataclass(frozen=True)
class Resume:
    """What `check` found: the changes that were accepted, and what a person should know."""

    accepted: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


def state_of(config: Config, identities: Mapping[str, Identity]) -> dict[str, Any]:
    """What a checkpoint keeps for `check`: the configuration (as text: a reward's options may hold infinities) and the
    identities of the inputs (`inputs.identify`)."""
    return {"config": json.dumps(config.model_dump(mode="json")), "inputs": dict(identities)}


def check(info: CheckpointInfo, config: Config, identities: Mapping[str, Identity]) -> Resume:
    """Whether a checkpoint may be resumed under this configuration, with these inputs.

    Settings that decide the result have to be the checkpoint's unless `run.accept_changes` names them, and inputs have to have
    the contents that they had unless `run.accept_changed_inputs`. Checkpoints of earlier versions hold neither: then the run
    directory's config.yaml is compared, names of inputs included.

    Raises:
        ResumeError: they differ; names each key, both values, and the ways out.
        ConfigError: `run.accept_changes` names no setting.
    """
    _check_accepted_keys(config)
    text, where = info.state.get("config"), storage.display(info.uri)
    known: dict[str, Identity] = info.state.get("inputs") or {}
    compared = frozenset(known.keys() & identities.keys())
    notes = []
    if identities and not known:
        notes.append(f"{where} is of an earlier version, which kept no digests of prompts and models: whether their contents "
                     "have changed since cannot be checked")
    saved = json.loads(text) if text is not None else _run_dir_config(info)
    if saved is None:
        if info.result_hash == config.result_hash(identities):
            return Resume((), tuple(notes))
        raise ResumeError(f"{where} was made with other settings, and {storage.display(info.run_dir)} has no config.yaml "
                              "that shows them; choose another run.name")
    by_contents = compared | ({"model.revision"} if "model.path" in compared else set())
    found = _changes(saved, config, frozenset(by_contents))
    rejected = [change for change in found if not _accepted(change.key, config.run.accept_changes)]
    if rejected:
        raise ResumeError(f"{where} was made with other settings (saved -> now):\n  " + "\n  ".join(map(str, rejected))
                              + f"\n{_ways_out(info, rejected)}")
    different = [change for key in sorted(compared) if (change := _compare(key, known[key], identities[key]))]
    if different and not config.run.accept_changed_inputs:
        names = {change.key: config.settings()[change.key].value for change in different}
        raise ResumeError(
            f"{where} was made with other contents of\n  " + "\n  ".join(
                f"{change.key} ({names[change.key]}): {change.old} -> {change.new}" for change in different)
            + "\nRestore them, choose another run.name, or accept them: run.accept_changed_inputs=true")
    return Resume((*found, *different), tuple(notes))


def refuse_other_settings(run_dir: str, config: Config) -> None:
    """Raise ResumeError if the run directory's config.yaml has other settings: for a run without a checkpoint."""
    uri = storage.join(run_dir, "config.yaml")
    saved = _read_config(uri) if storage.size(uri) is not None else {}
    if found := _changes(saved, config):
        raise ResumeError(f"{storage.display(run_dir)} holds a run with other settings and no checkpoint of it "
                              "(saved -> now):\n  " + "\n  ".join(map(str, found)) + "\nchoose another run.name")


def record(entries: list[dict[str, Any]], step: int, resume: Resume) -> list[dict[str, Any]]:
    """The accepted changes of a run: those before `step`, which it resumes from, and the new ones."""
    new = [{"step": step, **asdict(change)} for change in resume.accepted]
    return [entry for entry in entries if entry["step"] < step] + new


def _changes(saved: Mapping[str, Any], config: Config, leave_out: frozenset[str] = frozenset()) -> list[Change]:
    """`changes` of a saved tree and the present configuration. Earlier versions saved relative paths: those that end the
    present path are the same."""
    old, new = flat(Config, saved), config.settings()
    same = {key for key in old.keys() & new.keys() if new[key].is_input and isinstance(old[key].value, str)
            and str(new[key].value).endswith(os.sep + os.path.normpath(old[key].value))}
    return changes(old, new, leave_out | same)


def _check_accepted_keys(config: Config) -> None:
    keys = [key for key, setting in config.settings().items() if setting.mark == RESULT]
    for key in config.run.accept_changes:
        if key.partition(".")[0] != "rewards" and not any(_accepted(known, [key]) for known in keys):
            raise ConfigError(f"run.accept_changes: {key!r} is not a setting that decides the result{nearest(key, keys)}")


def _accepted(key: str, accepted: list[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in accepted)


def _ways_out(info: CheckpointInfo, rejected: list[Change]) -> str:
    keys = ", ".join(change.key for change in rejected)
    adapter = storage.join(info.uri, "adapter")
    if storage.local_path(info.uri) is None:
        adapter = "FOLDER, the output of `flowgrpo-ray export`"
    return (f"Train on with the saved settings, or accept the change: run.accept_changes=[{keys}]. Or start a new run from "
            f"this adapter, with a new optimizer: run.name=NEW lora.init_from={adapter}")


def _compare(key: str, old: Identity, new: Identity) -> Change | None:
    if old == new:
        return None
    files = sorted(name for name in {*old, *new} if name and old.get(name) != new.get(name))
    rest = f" and {len(files) - _FILES_SHOWN} more" if len(files) > _FILES_SHOWN else ""
    which = f" ({', '.join(files[:_FILES_SHOWN])}{rest})" if files else ""
    return Change(key, _short(old), _short(new) + which)


def _short(identity: Identity) -> str:
    """One word for the contents: a hub commit as it is, else the beginning of a digest."""
    value = identity[""] if identity.keys() == {""} else f"sha256:{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}"
    return value if "@" in value else value.partition(":")[2][:12]


def _run_dir_config(info: CheckpointInfo) -> dict[str, Any] | None:
    uri = storage.join(info.run_dir, "config.yaml")
    return _read_config(uri) if storage.size(uri) is not None else None


def _read_config(uri: str) -> dict[str, Any]:
    try:
        saved = yaml12.parse(storage.read_bytes(uri).decode("utf-8-sig")) or {}
        flat(Config, saved)
        return saved
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{storage.display(uri)} is damaged: {error}") from None
