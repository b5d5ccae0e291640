"""Paths of a configuration: made absolute once, where the command runs; every actor has a working directory of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowgrpo_ray.config.schema import PATH, PATH_OR_NAME, RewardConfig, Section, marks_of
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.rewards import reward_class

_JOB_FILES = os.path.join("runtime_resources", "working_dir_files")  # below Ray's session folder


def in_ray_job() -> bool:
    """Whether this process is the driver of a submitted Ray job, whose working directory Ray deletes after the job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # set by Ray's job manager, for the driver alone


def absolute(path: str) -> str:
    """A local path made absolute; URIs and `builtin:` names stay as they are."""
    return path if "://" in path or path.startswith("builtin:") else os.path.abspath(os.path.expanduser(path))


def absolute_unless_name(path: str) -> str:
    """The same for what may also be the name of a model: a path starts with /, . or ~, or something is there."""
    is_path = path.startswith(("/", ".", "~")) or Path(path).exists()
    return absolute(path) if is_path else path


@dataclass(frozen=True)
class PathSetting:
    """A setting, or an option of a reward, that holds a path.

    Attributes:
        key: dotted, as in `rewards.ocr.options.model_dir`.
        may_be_name: it may also be the name of a model.
        put: sets another value.
    """

    key: str
    value: str
    may_be_name: bool
    put: Callable[[str], None]


def paths_of(section: Section, prefix: str = "") -> Iterator[PathSetting]:
    """Every path of a configuration, in the order of its fields; what is None or no string is left out."""
    for name in type(section).model_fields:
        value, marks, key = getattr(section, name), marks_of(type(section), name), f"{prefix}{name}"
        if isinstance(value, Section):
            yield from paths_of(value, f"{key}.")
        elif isinstance(value, dict):
            for child_name, child in value.items():
                if isinstance(child, RewardConfig):
                    yield from _paths_of_options(child, child_name, f"{key}.{child_name}.options.")
        elif isinstance(value, str) and {PATH, PATH_OR_NAME} & marks:
            yield PathSetting(key, value, PATH not in marks, partial(setattr, section, name))


def _paths_of_options(reward: RewardConfig, name: str, prefix: str) -> Iterator[PathSetting]:
    texts = {key: value for key, value in reward.options.items() if isinstance(value, str)}
    known = options_of(reward.spec(name)) if texts else {}

    def put(key: str, value: str) -> None:
        reward.options = {**reward.options, key: value}

    for key, value in texts.items():
        if key in known and known[key].path:
            yield PathSetting(f"{prefix}{key}", value, True, partial(put, key))


def make_absolute(config: Section, for_job: bool = False) -> None:
    """Make the paths of a configuration absolute, in place.

    In a Ray job, and with `for_job` before its submission, a relative `run.dir` stays as it is: no folder of the job outlives
    it, so `check_run_dir` rejects it.
    """
    for_job = for_job or in_ray_job()
    for path in paths_of(config):
        if not (path.key == "run.dir" and for_job):
            path.put(absolute_unless_name(path.value) if path.may_be_name else absolute(path.value))


def options_of(reward: str) -> Mapping[str, Any]:
    """The options of a reward; none for code of your own that is not in this environment."""
    try:
        return reward_class(reward).options
    except ConfigError:
        return {}


def check_run_dir(run_dir: str) -> None:
    """Raise ConfigError for a `run.dir` in the working directory of a Ray job: a relative one (only a job leaves it so), or the
    folder that Ray has unpacked the job's files into."""
    unpacked = in_ray_job() and f"{os.sep}{_JOB_FILES}{os.sep}" in run_dir
    if "://" not in run_dir and (unpacked or not os.path.isabs(run_dir)):
        raise ConfigError(
            f"run.dir is {run_dir!r}, a path in the working directory of this Ray job, which Ray deletes: the run would be "
            "lost. Give a place that outlives the job: run.dir=s3://BUCKET/runs, run.dir=gs://BUCKET/runs, or the absolute "
            "path of a volume that is mounted on every node")
