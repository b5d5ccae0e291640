"""The contract of a reward, and the registry. Imports only the standard library and numpy, so that a reward can live in
another environment."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from flowgrpo_ray.errors import ConfigError, FlowGrpoError, nearest


class RewardError(FlowGrpoError):
    """A reward could not score a batch, or what it returned is no score. Never to be read as 0."""


@dataclass(frozen=True)
class Option:
    """One option of a reward: its default and what it may hold.

    `choices`, where given, are all the values it can take. Otherwise the value is of `kind`; None is right only where
    it is the default. `minimum` is the smallest number.
    """

    default: Any
    description: str
    kind: type = str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, or None."""
        if value is None and self.default is None:
            return None
        if self.choices:
            if any(value == choice and type(value) is type(choice) for choice in self.choices):
                return None
            return f"is {value!r}; the choices are {', '.join(map(str, self.choices))}" + (
                nearest(value, self.choices) if isinstance(value, str) and _is_near(value, self.choices) else "")
        # YAML's `true` is an int in Python, and `1` is a good float.
        right = isinstance(value, (int, float) if self.kind is float else self.kind)
        if not right or (isinstance(value, bool) and self.kind is not bool):
            return f"is {value!r}, not of type {self.kind.__name__}; the default is {self.default!r}"
        if self.minimum is not None and not value >= self.minimum:
            return f"is {value!r}; the smallest right value is {self.minimum:g}"
        return None


class Reward(ABC):
    """A scorer of images. A subclass's module must be cheap to import: heavy packages are imported in `__init__`, which
    loads the model, so that options and prompts are checked before any actor starts.

    Class attributes:
        name: registry name, and the key of the optimised score.
        range: (lowest, highest) score; infinite where there is no bound.
        scope: "sample" where a score depends on its own image alone, "group" where it needs the whole group.
        packages: distributions that scoring imports, as `pip install` names them.
        description: one line for people.
        options: the constructor's keywords.
    """

    name: ClassVar[str]
    range: ClassVar[tuple[float, float]]
    scope: ClassVar[Literal["sample", "group"]] = "sample"
    packages: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str] = ""
    options: ClassVar[dict[str, Option]] = {}

    def __init__(self, **options: Any) -> None:
        """Check `options` and keep them, defaults filled in, as `self.settings`; a subclass then loads its model.

        Raises:
            ConfigError: an unknown option or a wrong value; the nearest right one is named.
        """
        problems = _problems(type(self), options)
        if problems:
            raise ConfigError("\n".join(problems))
        self.settings: dict[str, Any] = _settings(type(self), options)

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """Which options, right one by one, do not go together, one sentence each. `settings` has every option."""
        return []

    @classmethod
    def check_prompt(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> str | None:
        """Why this prompt cannot be scored (with an example of a right one), or None. Loads no model.

        `options` are the reward's, where the answer depends on them; left out, the defaults hold.
        """
        return None

    @abstractmethod
    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        *,
        group_ids: Sequence[int] | None = None,
    ) -> dict[str, np.ndarray]:
        """Score a batch.

        Args:
            images: uint8 [n, H, W, 3], RGB.
            prompts: n prompts.
            metadata: n mappings, the `metadata` of the prompt records (empty where a record has none).
            group_ids: n ids; equal ids are samples of one prompt. Needed by rewards of scope "group" only.

        Returns:
            float32 [n] by key: the first key is the reward's name and is what is optimised, the others are monitors.

        Raises:
            RewardError: the input cannot be scored. Any exception means "no score", never 0.
        """


def check_batch(images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> int:
    """n of a well-formed batch; raises RewardError where images are not uint8 [n, H, W, 3] or the lengths differ."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        got = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise RewardError(f"images must be a uint8 array [n, H, W, 3] in RGB, not {got}")
    if not len(images) == len(prompts) == len(metadata):
        raise RewardError(f"{len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata do not pair up")
    return len(images)


def validated(result: Any, n: int, name: str) -> dict[str, np.ndarray]:
    """Check what a reward named `name` returned for `n` images.

    Returns:
        The same keys in the same order, float64 [n] each.

    Raises:
        RewardError: not a mapping of numbers, `name` is not the first key, a length is not n, or a score is NaN or
            infinite (the places are named).
    """
    if not isinstance(result, Mapping):
        raise RewardError(f"reward {name} returned a {type(result).__name__}, not a dict of float32 arrays")
    keys = list(result)
    if name not in result:
        raise RewardError(f"reward {name} returned no key {name!r} (its keys are {keys})")
    if keys[0] != name:
        raise RewardError(f"reward {name} returned {keys[0]!r} as the first key, but the first is optimised: {name!r}")
    out = {}
    for key, values in result.items():
        if not isinstance(key, str):
            raise RewardError(f"reward {name} returned the key {key!r}; keys are strings")
        try:
            array = np.asarray(values)
        except (ValueError, TypeError) as error:
            raise RewardError(f"reward {name}: {key!r} is no array of numbers: {error}") from error
        if array.dtype.kind not in "fiub":
            raise RewardError(f"reward {name}: {key!r} is of dtype {array.dtype}, not numbers")
        if array.shape != (n,):
            raise RewardError(f"reward {name}: {key!r} has shape {list(array.shape)}, not [{n}] as the images")
        array = array.astype(np.float64)
        wrong = np.flatnonzero(~np.isfinite(array))
        if wrong.size:
            raise RewardError(f"reward {name}: {key!r} is {array[wrong[0]]} at {wrong[:10].tolist()} of {n} images")
        out[key] = array
    return out


# Name to class, or to "module:Class", imported when it is first asked for.
_REGISTRY: dict[str, str | type[Reward]] = {
    "ocr": "flowgrpo_ray.rewards.ocr:OcrReward",
    "jpeg_compressibility": "flowgrpo_ray.rewards.jpeg:JpegCompressibility",
}


def register(name: str, cls: str | type[Reward]) -> None:
    """Add a reward to the registry of this process: a class, or "module:Class" to be imported when it is needed.

    Raises:
        ConfigError: the name is taken by another class, or `cls` is neither of the two forms.
    """
    if _REGISTRY.get(name, cls) != cls:
        raise ConfigError(f"a reward named {name!r} is already registered: {_REGISTRY[name]}")
    if isinstance(cls, str):
        module, colon, attribute = cls.partition(":")
        if not (module and colon and attribute):
            raise ConfigError(f"reward {name!r}: {cls!r} is not of the form module:Class")
    else:
        _check_class(name, cls)
    _REGISTRY[name] = cls


def known_rewards() -> list[str]:
    """Names of all registered rewards, in the order of registration."""
    return list(_REGISTRY)


def reward_class(name: str) -> type[Reward]:
    """The class behind a name (its module is imported, its model is not loaded).

    Raises:
        ConfigError: no reward has that name; the nearest one is named.
    """
    if name not in _REGISTRY:
        raise ConfigError(f"no reward is named {name!r}{nearest(name, _REGISTRY)}")
    entry = _REGISTRY[name]
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    cls = getattr(importlib.import_module(module), attribute, None)
    _check_class(name, cls)
    return cls


def option_problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a reward's options, one sentence each; empty where all is well. Loads no model.

    Raises:
        ConfigError: no reward has that name.
    """
    return _problems(reward_class(name), options)


def get(name: str, **options: Any) -> Reward:
    """Make a reward and load its model.

    Raises:
        ConfigError: an unknown name or option, or a wrong value; the nearest right one is named.
        RewardError: a package or model file that the reward needs is absent; the message says how to install it.
    """
    return reward_class(name)(**options)


def _check_class(name: str, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Reward)):
        raise ConfigError(f"reward {name!r}: {cls!r} is no subclass of Reward")
    if getattr(cls, "name", None) != name:
        raise ConfigError(f"reward {name!r}: {cls.__name__}.name is {getattr(cls, 'name', None)!r}; the two must agree")


def _problems(cls: type[Reward], options: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, value in options.items():
        if key not in cls.options:
            hint = nearest(str(key), cls.options) or "; it has none"
            problems.append(f"reward {cls.name} has no option {key!r}{hint}")
        elif problem := cls.options[key].problem(value):
            problems.append(f"reward {cls.name}: option {key} {problem}")
    if problems:
        return problems
    return [f"reward {cls.name}: {conflict}" for conflict in cls.conflicts(_settings(cls, options))]


def _settings(cls: type[Reward], options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: option.default for key, option in cls.options.items()} | dict(options)


def _is_near(value: str, choices: Sequence[Any]) -> bool:
    return nearest(value, map(str, choices)).startswith("; did you mean")
