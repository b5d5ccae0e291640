"""Rewards by name: those that we ship, those of installed packages (entry points of the group `flowgrpo_ray.rewards`), and
`module:function` or `module:Class` of your own. Imports only the standard library and numpy until a reward is asked for."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from flowgrpo_ray.errors import ConfigError, described, nearest
from flowgrpo_ray.rewards.base import (
    GroupIds,
    Metadata,
    Option,
    Reward,
    Scores,
    SelfTest,
    batch_size_problem,
    explained,
    problems_of,
    range_problem,
)

ENTRY_POINTS = "flowgrpo_ray.rewards"
_INPUTS = ("images", "prompts", "metadata")

# Name to class, or to "module:Class", imported when it is first asked for.
_REGISTRY: dict[str, str | type[Reward]] = {
    "ocr": "flowgrpo_ray.rewards.ocr:OcrReward",
    "video_ocr": "flowgrpo_ray.rewards.ocr:VideoOcrReward",
    "jpeg_compressibility": "flowgrpo_ray.rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "flowgrpo_ray.rewards.jpeg:JpegIncompressibility",
    "pickscore": "flowgrpo_ray.rewards.clip_scores:PickScore",
    "clipscore": "flowgrpo_ray.rewards.clip_scores:ClipScore",
    "image_similarity": "flowgrpo_ray.rewards.clip_scores:ImageSimilarity",
    "aesthetic": "flowgrpo_ray.rewards.aesthetic:Aesthetic",
    "hpsv2": "flowgrpo_ray.rewards.hpsv2:HpsV2",
    "image_reward": "flowgrpo_ray.rewards.image_reward:ImageReward",
    "remote": "flowgrpo_ray.rewards.remote:RemoteReward",
    "remote_group": "flowgrpo_ray.rewards.remote:RemoteGroupReward",
    "geneval": "flowgrpo_ray.rewards.geneval:GenEval",
    "deqa": "flowgrpo_ray.rewards.deqa:DeqaReward",
    "vlm_judge": "flowgrpo_ray.rewards.vlm_judge:VlmJudge",
    "unified_reward": "flowgrpo_ray.rewards.vlm_judge:UnifiedReward",
    "qwen_vl": "flowgrpo_ray.rewards.vlm_judge:QwenVl",
    "vlm_preference": "flowgrpo_ray.rewards.vlm_preference:VlmPreference",
}


def register(name: str, cls: str | type[Reward]) -> None:
    """Add a reward to the registry of this process: a class, or "module:Class" to be imported when it is needed.

    Raises:
        ConfigError: the name is taken by another class, or `cls` is neither of the two forms.
    """
    if _REGISTRY.get(name, cls) != cls:
        raise ConfigError(f"a reward named {name!r} is already registered: {_REGISTRY[name]}")
    if isinstance(cls, str):
        _split(name, cls)
    else:
        _check_class(name, cls)
    _REGISTRY[name] = cls


@lru_cache(maxsize=1)
def _installed() -> dict[str, EntryPoint]:
    """Rewards that other installed packages offer."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def known_rewards() -> list[str]:
    """Names of all rewards: ours and registered ones, then those of installed packages."""
    return list(dict.fromkeys([*_REGISTRY, *_installed()]))


def reward_class(name: str) -> type[Reward]:
    """The class behind a name, or behind `module:function` or `module:Class` (its module is imported, no model is loaded).

    Raises:
        ConfigError: no reward has that name (the nearest one is named), the module or what it should hold is not there, or
            the class does not keep to the contract in base.py.
    """
    if ":" in name:
        return _own(name)
    entry = _REGISTRY.get(name) or _installed().get(name)
    if entry is None:
        raise ConfigError(f"no reward is named {name!r}{nearest(name, known_rewards())}")
    if isinstance(entry, type):
        return entry
    point = EntryPoint(name, entry, ENTRY_POINTS) if isinstance(entry, str) else entry
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward {name!r} ({point.value}) cannot be imported: {described(error)}") from error
    if name not in _REGISTRY and callable(cls) and not isinstance(cls, type):
        return _of_function(name, cls)
    _check_class(name, cls)
    return cls


def option_problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a reward's options, one sentence each; empty where all is well. Loads no model.

    Raises:
        ConfigError: no reward has that name.
    """
    return problems_of(reward_class(name), options)


def video_problem(cls: type[Reward], where: str) -> str | None:
    """Why a reward cannot be used where there are only images (`where` begins the clause: "training samples"), or None."""
    if not cls.video:
        return None
    others = [name for name in known_rewards() if not name.startswith("video_")]
    return f"reward {cls.name} scores videos; {where} images{nearest(cls.name.removeprefix('video_'), others)}"


def get(name: str, **options: Any) -> Reward:
    """Make a reward and load its model.

    Raises:
        ConfigError: an unknown name or option, or a wrong value (the nearest right one is named), or an instance with a
            malformed range.
        RewardError: a package or model file that the reward needs is absent (the message says how to install it), or its
            constructor raised anything else.
    """
    cls = reward_class(name)
    with explained(name, "its constructor", cls.packages):
        reward = cls(**options)
    if problem := range_problem(reward.range):
        raise ConfigError(f"reward {name!r}: {type(reward).__name__}: {problem}")
    return reward


def _split(name: str, path: str) -> tuple[str, str]:
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"reward {name!r}: {path!r} is not of the form module:Class")
    return module, attribute


def _check_class(name: str, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Reward)):
        raise ConfigError(f"reward {name!r}: {cls!r} is no subclass of Reward")
    if getattr(cls, "name", None) != name:
        raise ConfigError(f"reward {name!r}: {cls.__name__}.name is {getattr(cls, 'name', None)!r}; the two must agree")
    if problems := _contract_problems(cls):
        raise ConfigError("\n".join(f"reward {name!r}: {cls.__name__}: {problem}" for problem in problems))


def _contract_problems(cls: type[Reward]) -> list[str]:
    """What of a class's attributes and methods breaks the contract in base.py, one sentence each."""
    problems = []
    if inspect.isabstract(cls):
        problems.append(f"it has no method {', '.join(sorted(cls.__abstractmethods__))}")
    bounds = getattr(cls, "range", None)
    if bounds is None:
        problems.append("it has no range; state (lowest, highest) score, infinite where there is no bound")
    elif problem := range_problem(bounds):
        problems.append(problem)
    if cls.scope not in ("sample", "group"):
        problems.append(f"scope is {cls.scope!r}{nearest(str(cls.scope), ('sample', 'group'))}")
    if cls.device not in ("cpu", "any"):
        problems.append(f"device is {cls.device!r}, neither 'cpu' nor 'any' (a GPU where its actor has one)")
    if problem := batch_size_problem(cls.batch_size):
        problems.append(f"batch_size {problem}")
    options = cls.options
    if not (isinstance(options, dict) and all(isinstance(k, str) and isinstance(o, Option) for k, o in options.items())):
        problems.append(f"options is {options!r}, not a dict of Option by name")
    elif "batch_size" in options and (default := options["batch_size"].default) is not None \
            and (problem := batch_size_problem(default)):
        problems.append(f"the default of option batch_size {problem}")
    return problems


# Your own -------------------------------------------------------------------------------------------------------------

def _own(path: str) -> type[Reward]:
    module_name, attribute = _split(path, path)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not look into the folder it is called from
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever its code does when it is imported
        raise ConfigError(f"reward {path}: the module {module_name} cannot be imported: {described(error)}") from error
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if found is None:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(f"reward {path}: {module_name} has no {attribute!r}{nearest(attribute, names)}")
    if isinstance(found, type) and issubclass(found, Reward):
        _check_class(getattr(found, "name", attribute), found)
        return found
    if not callable(found):
        raise ConfigError(f"reward {path}: {attribute} is a {type(found).__name__}; give a function or a subclass of Reward")
    return _of_function(attribute.rpartition(".")[2], found)


def _kind(default: Any) -> type:
    """What an option may be, by its default: any number for a number, anything for None."""
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return type(default) if isinstance(default, (bool, str, list, dict)) else object
    return float


def _of_function(name: str, function: Callable[..., Any]) -> type[Reward]:
    """A reward class around `function(images, prompts, metadata, **options)`, which returns n numbers, or a dict of
    them whose first entry is optimised.

    Keywords with a default are the reward's options. The function may carry `scope`, `range`, `device` and `batch_invariant`
    as attributes; where it takes `group_ids`, it is given them.

    Raises:
        ConfigError: the function does not take images, prompts and metadata, or one of its attributes is wrong.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError) as error:  # of code that is not Python's
        raise ConfigError(f"reward {name}: {error}; call it from a function of the form {name}(images, prompts, metadata)"
                          ) from error
    if positional := [key for key, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]:
        raise ConfigError(f"reward {name}: the parameter {positional[0]} of the function is positional only; it is called with "
                          "keywords")
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if missing := [key for key in _INPUTS if key not in parameters and not takes_rest]:
        raise ConfigError(f"reward {name}: the function lacks the parameter {', '.join(missing)}; it must have the form "
                          f"{name}(images, prompts, metadata)")
    unknown = [key for key, p in parameters.items() if key not in (*_INPUTS, "group_ids") and p.default is p.empty
               and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if unknown:
        raise ConfigError(f"reward {name}: the parameter {unknown[0]} of the function needs a default; it is an option then")
    with_ids = "group_ids" in parameters or takes_rest

    class FunctionReward(Reward):
        def self_test_case(self) -> SelfTest | None:
            if not self.batch_invariant:
                return None
            images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
            return SelfTest(images, ('the word "A"',) * 3, ordered=False)

        def score(
            self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
        ) -> Scores:
            ids = {"group_ids": group_ids} if with_ids else {}
            result = function(images=images, prompts=prompts, metadata=metadata, **ids, **self.settings)
            if not isinstance(result, Mapping):
                return {self.name: result}
            first = next(iter(result), None)
            if self.name in result:
                return dict(result)  # if it is not the first, `validated` says so
            return {self.name if key == first else key: values for key, values in result.items()}

    FunctionReward.name = name
    FunctionReward.range = getattr(function, "range", (-float("inf"), float("inf")))
    FunctionReward.scope = getattr(function, "scope", "sample")
    FunctionReward.device = getattr(function, "device", "any")
    FunctionReward.batch_invariant = bool(getattr(function, "batch_invariant", False))
    FunctionReward.description = (inspect.getdoc(function) or "a custom function").splitlines()[0]
    FunctionReward.options = {
        key: Option(p.default, "keyword of the function", kind=_kind(p.default)) for key, p in parameters.items()
        if key not in (*_INPUTS, "group_ids") and p.default is not p.empty
    }
    FunctionReward.__name__ = FunctionReward.__qualname__ = name
    FunctionReward.__module__ = function.__module__
    _check_class(name, FunctionReward)
    return FunctionReward
