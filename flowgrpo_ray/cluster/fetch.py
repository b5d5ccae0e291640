"""`flowgrpo-ray fetch`: the models of a configuration into the hub's cache, once for each cache.

Many processes may ask for the same on one node (an init container in every pod, over one folder of the node): a lock file for
each model lets one of them download, and a note of what is there lets the others pass. Actors then load with HF_HUB_OFFLINE.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from flowgrpo_ray import hub, waiting
from flowgrpo_ray.config import Config
from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.errors import ConfigError, DeadlineError
from flowgrpo_ray.policies import find, policy_class
from flowgrpo_ray.policies.source import INDEX_NAME
from flowgrpo_ray.rewards.base import HubSource, settings_of

log = logging.getLogger(__name__)

T = TypeVar("T")
FOLDER = ".flowgrpo-ray"  # of locks and notes, in the hub's cache
COMMIT = re.compile(r"[0-9a-f]{40}")
SMALL = (".json", ".txt", ".model", ".jinja")  # configurations and tokenizers
STEMS = ("model.safetensors", "pytorch_model.bin")  # as transformers looks for weights
_POLL_S = 10.0


@dataclass(frozen=True)
class Wanted:
    """Something that is loaded from the hub: a diffusers pipeline, a model of transformers, or one file."""

    setting: str
    repo: str
    revision: str | None
    file: str | None = None
    weights: bool = True
    model: ModelConfig | None = None  # of a pipeline

    @property
    def key(self) -> str:
        """Names what is fetched; two settings that want the same share it."""
        parts = asdict(self) | {"setting": "", "model": self.model and self.model.model_dump(mode="json")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.repo}{f'/{self.file}' if self.file else ''}{f'@{self.revision}' if self.revision else ''}"


def fetch(config: Config, only: str = "all") -> list[str]:
    """Bring what a configuration loads from the hub into its cache.

    Args:
        only: "model", "rewards", or "all".

    Returns:
        a line for each model: whether it was fetched or there already, or is local.

    Raises:
        ConfigError: a model is missing, gated (with its licence's address), or cannot be reached.
        DeadlineError: `run.hub_timeout_s` is over; what was downloaded is kept.
    """
    lines: list[str] = []
    wanted: dict[Any, Wanted] = {}
    for item in [*(_of_model(config) if only != "rewards" else []), *(_of_rewards(config) if only != "model" else [])]:
        if isinstance(item, str):
            lines.append(item)
        else:
            wanted.setdefault(item.key, item)
    return lines + [_once(item) for item in wanted.values()]


def _of_model(config: Config) -> Iterator[Wanted | str]:
    model = config.model
    source = find(model)
    if source.local:
        yield f"model.path: {model.path} is local"
        return
    loaded = ModelConfig(path=model.path, revision=model.revision, variant=model.variant, use_t5=model.use_t5)
    yield Wanted("model.path", model.path, model.revision, model=loaded)


def _of_rewards(config: Config) -> Iterator[Wanted | str]:
    from flowgrpo_ray.preflight import known_class

    for name, reward in config.rewards.items():
        cls = known_class(name, reward)
        sources = cls.hub_sources(settings_of(cls, reward.options)) if cls is not None else []
        if not sources:
            yield f"rewards.{name}: nothing is on the hub"
        for source in sources:
            setting = f"rewards.{name}.options.{source.option}"
            if Path(source.name).expanduser().exists():
                yield f"{setting}: {source.name} is local"
            else:
                yield _parsed(setting, source)


def _parsed(setting: str, source: HubSource) -> Wanted:
    parts = source.name.split("/")
    if parts[0] in ("", ".", "..", "~"):
        raise ConfigError(f"{setting}: there is no {source.name}")
    if len(parts) > 2:
        return Wanted(setting, "/".join(parts[:2]), source.revision, file="/".join(parts[2:]))
    return Wanted(setting, source.name, source.revision, weights=source.weights)


def _once(wanted: Wanted) -> str:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / FOLDER
    note = folder / f"{wanted.key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the hub's cache {constants.HF_HUB_CACHE} cannot be written ({error.strerror}): set HF_HOME to a "
                          "folder that this user may write to") from error
    with _locked(folder / f"{wanted.key}.lock", wanted):
        if _is_there(note, wanted):
            return f"{wanted.setting}: {wanted} is there"
        with hub.explained(f"{wanted.setting} {wanted.repo!r}", wanted.repo, wanted.revision,
                           f"the hub's repository has no {wanted.file or INDEX_NAME}"):
            snapshot = _download(wanted)
        files = [file for file in snapshot.rglob("*") if file.is_file()]
        note.write_text(json.dumps({"what": str(wanted), "commit": _commit_of(snapshot, constants.HF_HUB_CACHE),
                                    "files": sorted(str(file) for file in files)}))
        size = sum(file.stat().st_size for file in files)
        return f"{wanted.setting}: {wanted} is fetched, {size / 1e9:.2f} GB"


def _commit_of(snapshot: Path, cache: str) -> str:
    return snapshot.relative_to(cache).parts[2]  # models--owner--name/snapshots/COMMIT


def _is_there(note: Path, wanted: Wanted) -> bool:
    """Whether all was fetched before and is what the hub has: a branch may have moved on, a commit does not."""
    try:
        found = json.loads(note.read_text())
        complete = all(map(Path.exists, map(Path, found["files"])))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if not complete or (wanted.revision and COMMIT.fullmatch(wanted.revision)):
        return complete
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return True
    try:
        return _bounded(lambda: HfApi().model_info(wanted.repo, revision=wanted.revision).sha, wanted) == found["commit"]
    except Exception as error:  # the cache serves, as it would without this question
        log.warning("%s: the hub does not say whether %s has changed (%s); what is in the cache is used",
                    wanted.setting, wanted, type(error).__name__)
        return True


@contextmanager
def _locked(path: Path, wanted: Wanted) -> Iterator[None]:
    """Hold a lock file, waiting for another process's download as long as this one's may take."""
    from filelock import FileLock, Timeout

    lock, start = FileLock(path), time.monotonic()
    while True:
        try:
            lock.acquire(timeout=min(_POLL_S, waiting.limits.hub))
            break
        except Timeout:
            waited = time.monotonic() - start
            if waited >= waiting.limits.hub:
                raise DeadlineError(f"another process has been fetching {wanted} for {waited:.0f} s (run.hub_timeout_s; its "
                                    f"lock is {path})") from None
            log.warning("waiting for another process on this node that fetches %s, since %.0f s", wanted, waited)
    try:
        yield
    finally:
        lock.release()


def _download(wanted: Wanted) -> Path:
    """The folder of the snapshot that holds what was fetched."""
    import huggingface_hub

    if wanted.model is not None:
        policy_class(find(wanted.model).family).fetch(wanted.model)
        index = huggingface_hub.try_to_load_from_cache(wanted.repo, INDEX_NAME, revision=wanted.revision)
        return Path(str(index)).parent
    if wanted.file is not None:
        path = _bounded(lambda: huggingface_hub.hf_hub_download(wanted.repo, wanted.file, revision=wanted.revision), wanted)
        return Path(path).parents[wanted.file.count("/")]
    names = _bounded(lambda: huggingface_hub.HfApi().list_repo_files(wanted.repo, revision=wanted.revision), wanted)
    files = needed_files(names, weights=wanted.weights)
    return Path(_bounded(lambda: huggingface_hub.snapshot_download(
        wanted.repo, revision=wanted.revision, allow_patterns=files), wanted))


def needed_files(names: list[str], *, weights: bool) -> list[str]:
    """Which files of a repository transformers loads: of several formats of the weights, the first that it looks for."""
    top = [name for name in names if "/" not in name]
    indices = [f"{stem}.index.json" for stem in STEMS]
    others = tuple(f"{stem}.index.json" for stem in ("tf_model.h5", "flax_model.msgpack"))
    small = [name for name in top if name.endswith(SMALL) and name not in (*indices, *others)]
    if not weights:
        return small
    for stem, index in zip(STEMS, indices, strict=True):
        if stem in top:
            return [*small, stem]
        if index in top:
            base, ending = stem.split(".")
            return [*small, index, *(name for name in top if re.fullmatch(rf"{base}-\d+-of-\d+\.{ending}", name))]
    return small


def _bounded(call: Callable[[], T], wanted: Wanted) -> T:
    return waiting.bounded(call, f"{wanted} from the Hugging Face Hub", waiting.limits.hub, setting="run.hub_timeout_s")
