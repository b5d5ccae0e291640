"""The contract of a reward. Imports only the standard library and numpy, so that a reward can live in another environment."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from flowgrpo_ray.errors import ConfigError, FlowGrpoError, counted, described, nearest, place_of
from flowgrpo_ray.signals import by_signal

if TYPE_CHECKING:
    from flowgrpo_ray.data.prompts import PromptRecord

PINNED = ("model", "checkpoint", "detector")  # options that option `revision` is of
LARGEST = 1e12  # of a score's absolute value: squares and sums of scores stay far from overflow

# What `Reward.score` takes and gives, apart from the images.
Metadata = Sequence[Mapping[str, Any]]
GroupIds = Sequence[int] | None
Scores = dict[str, np.ndarray]


class RewardError(FlowGrpoError):
    """A reward could not score a batch, or what it returned is no score. Never to be read as 0."""


@dataclass(frozen=True)
class Option:
    """One option of a reward: its default and what it may hold.

    `choices`, where given, are all the values it can take. Otherwise the value is of `kind`; None is right only where
    it is the default. `minimum` and `maximum` are the smallest and the largest number. Numbers are finite, but for a
    default that is not. `infrastructure`: it says where and how a server is asked. No score depends on it, so it may change
    when a run resumes. `path`: a local path, or the name of a model; a path is made absolute when the configuration is loaded.
    `weights`: of a model with that name the weights are loaded, not its tokenizer or configuration alone.
    """

    default: Any
    description: str
    kind: type = str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    infrastructure: bool = False
    path: bool = False
    weights: bool = True

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, or None."""
        if self.kind is object or (value is None and self.default is None):
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
        if isinstance(value, (int, float)) and not is_finite(value) and value != self.default:
            return f"is {value!r}, not a finite number; the default is {self.default!r}"
        if self.minimum is not None and not value >= self.minimum:
            return f"is {value!r}; use at least {self.minimum:g}"
        if self.maximum is not None and not value <= self.maximum:
            return f"is {value!r}; use at most {self.maximum:.15g}"
        return None


def is_finite(number: float) -> bool:
    """Whether a number is one that a float can hold: not NaN, not infinite, no whole number of 400 digits."""
    return abs(number) <= sys.float_info.max


@contextmanager
def no_exit(name: str) -> Iterator[None]:
    """Around the code of a reward: where that calls sys.exit, the process that asks for a score must not end.

    Raises:
        RewardError: it did; names the reward.
    """
    try:
        yield
    except SystemExit as error:
        if by_signal(error):
            raise
        raise RewardError(f"reward {name} called sys.exit({error.code!r})") from error


@contextmanager
def explained(name: str, what: str, packages: Sequence[str] = ()) -> Iterator[None]:
    """Around the code of a reward that has to succeed before anything is scored, whoever wrote it; `what` it is, for people.

    Raises:
        RewardError: in place of any exception but ours; names the reward, the error, and the file and line of its code, and
            where an import failed the packages that the reward needs.
    """
    try:
        with no_exit(name):
            yield
    except FlowGrpoError:
        raise
    except Exception as error:
        needed = f"; it needs {', '.join(packages)} in the environment that it runs in" if packages else ""
        raise RewardError(f"reward {name}: {what} fails: {described(error)} ({place_of(error)})"
                          + (needed if isinstance(error, ImportError) else "")) from error


def self_tested(reward: Reward) -> None:
    """Run a reward's self-test, its own where it has one; raises RewardError."""
    with explained(reward.name, "its self-test", reward.packages):
        reward.self_test()


def read_only(images: np.ndarray) -> np.ndarray:
    """A view of images that cannot be written to, nor be made writeable again, as in a run, where they lie in memory that
    others share: a reward that works in place fails everywhere alike. The array itself is read-only afterwards, too."""
    images.flags.writeable = False
    return images.view()


@dataclass(frozen=True)
class HubSource:
    """A local path, OWNER/REPO or OWNER/REPO/FILE, of an option of a reward; of OWNER/REPO the weights only with `weights`."""

    option: str
    name: str
    revision: str | None = None
    weights: bool = True


@dataclass(frozen=True)
class SelfTest:
    """Images whose order is known: under the prompts the scores fall from the first to the last.

    images: uint8 [n, H, W, 3], RGB; prompts, metadata: n of each. With `ordered` False the scores only have to be there and
    inside `range`, which is the reward's where it is None.
    """

    images: np.ndarray
    prompts: tuple[str, ...]
    metadata: tuple[dict[str, Any], ...] = ()
    ordered: bool = True
    range: tuple[float, float] | None = None


def red_above_blue(*, ordered: bool = True) -> SelfTest:
    """The self-test of rewards that read the prompt: a plain red image, then a plain blue one, where red is asked for."""
    images = np.zeros((2, 64, 64, 3), np.uint8)
    images[0, ..., 0] = images[1, ..., 2] = 255
    return SelfTest(images, ("a plain red image",) * 2, ordered=ordered)


class Reward(ABC):
    """A scorer of images. A subclass's module must be cheap to import: heavy packages are imported in `__init__`, which
    loads the model, so that options and prompts are checked before any actor starts.

    Attributes of an instance:
        settings: the options, defaults filled in; there before `__init__` runs.
        notes: what people should know about how it scores, such as what it has to do without. It adds to them at any time; the
            driver logs each text once.

    Class attributes:
        name: registry name, and the key of the optimised score.
        range: (lowest, highest) score; infinite where there is no bound. A score outside is an error: a sentinel such as -1
            must not be learned from. An instance may set its own.
        scope: "sample" where a score depends on its own image alone, "group" where it needs the whole group.
        video: it scores videos, [n, T, H, W, 3]; training samples images.
        device: "cpu", or "any" where a GPU is used if the actor has one.
        needs: what it reads beside the image: "prompt", names of metadata keys, "server".
        packages: distributions that scoring imports, as `pip install` names them.
        licence: of the weights (and of the code, where it is another), for people.
        max_group: the largest group that a reward of scope "group" scores; None: any. An instance may set its own.
        batch_size: images per forward pass; the option of that name, where there is one, says otherwise.
        batch_invariant: a score has the same bits whatever else is in the batch; `self_test` checks it. Such a reward's
            calls may be filled up with images of several shards.
        description: one line for people.
        options: the constructor's keywords.
    """

    name: ClassVar[str]
    range: tuple[float, float]
    scope: ClassVar[Literal["sample", "group"]] = "sample"
    video: ClassVar[bool] = False
    device: ClassVar[Literal["cpu", "any"]] = "cpu"
    needs: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    licence: ClassVar[str] = ""
    max_group: int | None = None
    batch_size: ClassVar[int] = 16
    batch_invariant: ClassVar[bool] = False
    description: ClassVar[str] = ""
    options: ClassVar[dict[str, Option]] = {}
    notes: tuple[str, ...] = ()

    settings: dict[str, Any]

    def __new__(cls, **options: Any) -> Self:
        """Check the options and keep them.

        Raises:
            ConfigError: an unknown option or a wrong value; the nearest right one is named.
        """
        if problems := problems_of(cls, options):
            raise ConfigError("\n".join(problems))
        self = super().__new__(cls)
        self.settings = settings_of(cls, options)
        return self

    def __init__(self, **options: Any) -> None:
        """A subclass loads its model here."""
        super().__init__()

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """Which options, right one by one, do not go together, one sentence each. `settings` has every option."""
        return []

    @classmethod
    def hub_sources(cls, settings: Mapping[str, Any]) -> list[HubSource]:
        """What a reward may load from the Hugging Face Hub: every option that is a path or the name of a model."""
        return [HubSource(key, settings[key], settings.get("revision") if key in PINNED else None, option.weights)
                for key, option in cls.options.items() if option.path and isinstance(settings[key], str)]

    @classmethod
    def longest_wait(cls, settings: Mapping[str, Any]) -> float:
        """Seconds that one request to the reward's own server may take, its retries included; 0 where it asks none."""
        return 0.0

    @classmethod
    def requests_in_turn(cls, settings: Mapping[str, Any], images: int) -> int:
        """Requests to the reward's own server that a call for so many images sends one after another. Those that are under
        way at once count as one."""
        return 1

    @classmethod
    def group_problem(cls, settings: Mapping[str, Any], size: int) -> str | None:
        """Why groups of `size` images cannot be scored under these settings, or None. Asked of rewards of scope "group"."""
        return None

    @classmethod
    def check_prompt(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> str | None:
        """Why this prompt cannot be scored (with an example of a right one), or None. Loads no model.

        `options` are the reward's, where the answer depends on them; left out, the defaults hold.
        """
        return None

    @classmethod
    def needed_span(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> tuple[int, int] | None:
        """[start, end) of the characters of a prompt that the model must see, or no image of it can score well; None: any."""
        return None

    def gpu_problem(self) -> str | None:
        """Why it does not work on the GPU that its actor was given, or None. Asked where `device` is "any"."""
        torch = sys.modules.get("torch")
        return "torch sees none: is this a CPU build of torch?" if torch and not torch.cuda.is_available() else None

    def self_test_case(self) -> SelfTest | None:
        """Images whose order is known under these settings; None where there are none."""
        return None

    def self_test(self) -> None:
        """Score known images; runs when the actor starts, so that a broken installation does not pass for a low reward.

        Raises:
            RewardError: scores in the wrong order or out of range, or a batch that changes the bits of a score.
        """
        with no_exit(self.name):
            case = self.self_test_case()
        if case is None:
            if self.batch_invariant:
                raise RewardError(f"reward {self.name} is declared batch_invariant, and has no self_test_case to check it with")
            return
        metadata = case.metadata or ({},) * len(case.prompts)

        def score(rows: Sequence[int]) -> np.ndarray:
            with no_exit(self.name):
                result = self.score(read_only(case.images[list(rows)]), [case.prompts[i] for i in rows],
                                    [metadata[i] for i in rows], group_ids=[0] * len(rows))
            return validated(result, len(rows), self.name)[self.name]

        every = range(len(case.prompts))
        scores = score(every)
        low, high = bounds = case.range or self.range
        if _outside(scores, bounds).size:
            raise RewardError(f"reward {self.name} fails its self-test: scores {scores.tolist()} outside {low:g} to {high:g}")
        if case.ordered and not (np.diff(scores) < 0).all():
            raise RewardError(f"reward {self.name} fails its self-test: known images should score from high to low, and got "
                              f"{scores.tolist()}; its model or weights are not what they should be")
        if self.batch_invariant:
            alone = np.concatenate([score([i]) for i in every])
            if alone.tobytes() != scores.tobytes():
                raise RewardError(f"reward {self.name} is declared batch_invariant, and its scores depend on the batch: "
                                  f"{scores.tolist()} together, {alone.tolist()} one by one")

    @abstractmethod
    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """Score a batch.

        Args:
            images: uint8 [n, H, W, 3], RGB, read-only: copy what is to be changed.
            prompts: n prompts.
            metadata: n mappings, the `metadata` of the prompt records (empty where a record has none).
            group_ids: n ids; equal ids are samples of one prompt. Given to rewards of scope "group", which get whole groups.

        Returns:
            float32 [n] by key: the first key is the reward's name and is what is optimised, the others are monitors.

        Raises:
            RewardError: the input cannot be scored. Any exception means "no score", never 0.
        """


def check_batch(
    images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *, video: bool = False
) -> int:
    """n of a well-formed batch; raises RewardError where images are not uint8 [n, H, W, 3] ([n, T, H, W, 3] of a video) or the
    lengths differ."""
    shape, dims = ("[n, T, H, W, 3]", 5) if video else ("[n, H, W, 3]", 4)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != dims or images.shape[-1] != 3:
        got = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise RewardError(f"images must be a uint8 array {shape} in RGB, not {got}")
    if not len(images) == len(prompts) == len(metadata):
        raise RewardError(f"{counted(len(images), 'image')}, {counted(len(prompts), 'prompt')} and {len(metadata)} metadata "
                          "do not pair up")
    return len(images)


def validated(
    result: Any, n: int, name: str, *, range: tuple[float, float] | None = None
) -> dict[str, np.ndarray]:
    """Check what a reward named `name` returned for `n` images. `range` is the reward's, which its score, not its monitors,
    must lie in.

    Returns:
        The same keys in the same order, float64 [n] each.

    Raises:
        RewardError: not a mapping of numbers, `name` is not the first key, a length is not n, or a score is NaN, infinite,
            masked or out of range (the places are named).
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
        _refuse_masked(values, key, n, name)
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
            raise RewardError(f"reward {name}: {key!r} is {array[wrong[0]]} at {wrong[:10].tolist()} of {counted(n, 'image')}")
        if (np.abs(array) > LARGEST).any():
            found = array[np.abs(array).argmax()]
            raise RewardError(f"reward {name}: {key!r} is {found:g}, which is no score (beyond {LARGEST:g})")
        out[key] = array
    if range is not None:
        check_range(out[name], name, range)
    return out


def _refuse_masked(values: Any, key: str, n: int, name: str) -> None:
    """RewardError where an entry is masked: NumPy would read the number that is hidden behind the mask."""
    parts = [values] if isinstance(values, np.ma.MaskedArray) else values if isinstance(values, (list, tuple)) else []
    masks = [np.ma.getmaskarray(part).ravel() for part in parts if isinstance(part, np.ma.MaskedArray)]
    if count := sum(int(mask.sum()) for mask in masks):
        at = f" at {np.flatnonzero(masks[0])[:10].tolist()}" if parts[0] is values else ""
        raise RewardError(f"reward {name}: {key!r} is masked{at}, so {count} of {counted(n, 'image')} have no score")


def range_problem(bounds: Any) -> str | None:
    """What is wrong with a declared range, or None: it is (lowest, highest), infinite where there is no bound."""
    right = isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(
        isinstance(b, (int, float, np.number)) and not isinstance(b, (bool, complex, np.complexfloating)) for b in bounds)
    return None if right and bounds[0] < bounds[1] else f"range is {bounds!r}, not (lowest, highest)"


def _outside(values: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Places of the scores that are outside a range, by more than rounding in float32 explains."""
    low, high = bounds
    slack = 1e-6 * max([1.0, *(abs(bound) for bound in bounds if math.isfinite(bound))])
    return np.flatnonzero((values < low - slack) | (values > high + slack))


def check_range(values: np.ndarray, name: str, bounds: tuple[float, float]) -> None:
    """Raises RewardError where a score is outside its range: a sentinel for "no score" must not be learned from."""
    low, high = bounds
    wrong = _outside(values, bounds)
    if wrong.size:
        raise RewardError(f"reward {name}: {values[wrong[0]]:g} is outside {low:g} to {high:g}, so it is no score (a sentinel "
                          f"for 'not applicable'?), at {wrong[:10].tolist()} of {counted(len(values), 'image')}")


def renamed(scores: Mapping[str, np.ndarray], kind: str, name: str) -> dict[str, np.ndarray]:
    """Scores of a reward of `kind` that is configured as `name`: its own as `name`, every monitor as `name_…`, so that two
    rewards can use one word. `ocr_exact` of `reader` is `reader_exact`.

    Raises:
        ConfigError: two of them would have one name.
    """
    out: dict[str, np.ndarray] = {}
    for key, values in scores.items():
        new = name if key == kind else f"{name}_{key.removeprefix(f'{kind}_')}"
        if new in out:
            raise ConfigError(f"reward {name} gives two scores that would both be named {new!r} (it gives "
                              f"{', '.join(scores)}); give one of them another name")
        out[new] = values
    return out


def prompt_problem(name: str, cls: type[Reward], record: PromptRecord, options: Mapping[str, Any]) -> str | None:
    """Why a reward cannot score a prompt, or None.

    Raises:
        ConfigError: its check_prompt fails; names reward, line and prompt.
        RewardError: as check_prompt.
    """
    try:
        with no_exit(name):
            return cls.check_prompt(record.prompt, record.reward_metadata, **options)
    except RewardError:
        raise
    except Exception as error:  # whatever custom code does
        raise ConfigError(f"reward {name}: check_prompt fails on line {record.line}: {record.prompt!r}: {described(error)}"
                          ) from error


def problems_of(cls: type[Reward], options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a reward's options, one sentence each; empty where all is well. Loads no model."""
    problems = []
    for key, value in options.items():
        if key not in cls.options:
            hint = nearest(str(key), cls.options) or "; it has none"
            problems.append(f"reward {cls.name} has no option {key!r}{hint}")
        elif problem := cls.options[key].problem(value):
            problems.append(f"reward {cls.name}: option {key} {problem}")
        elif key == "batch_size" and value is not None and (problem := batch_size_problem(value)):
            problems.append(f"reward {cls.name}: option batch_size {problem}")
    if problems:
        return problems
    with explained(cls.name, "its check of the options"):
        return [f"reward {cls.name}: {conflict}" for conflict in cls.conflicts(settings_of(cls, options))]


def batch_size_problem(value: Any) -> str | None:
    """What is wrong with a number of images per call, or None."""
    right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return None if right else f"is {value!r}, not a whole number of images, 1 or more"


def batch_size_of(cls: type[Reward], options: Mapping[str, Any]) -> int:
    """Images that a reward takes at once: its option `batch_size`, where it has one that is not None, else its attribute."""
    size = settings_of(cls, options).get("batch_size")
    return cls.batch_size if size is None else size


def settings_of(cls: type[Reward], options: Mapping[str, Any]) -> dict[str, Any]:
    """A reward's options with the defaults filled in."""
    return {key: option.default for key, option in cls.options.items()} | dict(options)


def _is_near(value: str, choices: Sequence[Any]) -> bool:
    return nearest(value, map(str, choices)).startswith("; did you mean")
