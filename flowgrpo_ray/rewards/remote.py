"""remote: a reward behind HTTP, served by `flowgrpo-ray serve-reward` or anything that speaks its protocol.

The protocol is JSON with PNG images in base64; nothing is ever unpickled.

    POST /v1/score   {"images": [base64 PNG, ...], "prompts": [text, ...], "metadata": [{...}, ...], "group_ids": null}
                     -> {"scores": {name: [number, ...], ...}}, the optimised score and its monitors
    GET /v1/self_test -> images of known order, in the form of a request, with "ordered"; null where there are none
    GET /health      -> {"name", "range": [low, high] (null: no bound), "scope", "max_batch", ...}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from flowgrpo_ray.errors import counted, nearest
from flowgrpo_ray.rewards.base import (
    LARGEST,
    GroupIds,
    Metadata,
    Option,
    Reward,
    RewardError,
    Scores,
    SelfTest,
    check_batch,
    is_finite,
)
from flowgrpo_ray.rewards.http_client import (
    CONNECTION,
    HttpClient,
    HttpError,
    from_png,
    longest_wait,
    to_base64,
    to_png,
    url_problem,
)

EXAMPLE_URL = "http://127.0.0.1:8123"
MAX_PIXELS = 1 << 28  # of all images of a request together

REMOTE_OPTIONS: dict[str, Option] = {
    "url": Option(None, f"Address of the reward server, for example {EXAMPLE_URL}", infrastructure=True),
    "batch_size": Option(16, "Images per request; a whole group where the reward scores groups", kind=int, minimum=1),
    "score": Option(None, "Name of the score to optimise; default is the name of the served reward"),
    **CONNECTION,
}


def json_problem(metadata: Mapping[str, Any]) -> str | None:
    """Why the metadata of a prompt cannot be sent to a server, or None."""
    for key, value in metadata.items():
        try:
            json.dumps({key: value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            return (f"metadata {key!r} is {_shown(value)}, which the server cannot be sent as JSON ({error}); a text is right, "
                    "for example")
    return None


def check_served(who: str, client: RewardClient, problem: str | None) -> None:
    """Raises RewardError, which says how a server that is asked for `who` describes itself, where there is a problem."""
    if problem:
        low, high = client.range
        raise RewardError(f"reward {who}: {client.url} serves {client.health['name']}, of the range {low:g} to {high:g}: "
                          f"{problem}; give the url of another server, or use the reward remote")


def within(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    """Whether a range lies inside another."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


class RewardClient:
    """Talks to one reward server; what `RemoteReward` and its presets are made of.

    Args:
        who: name that the optimised score gets, and the prefix of the monitors.
        settings: the options in `REMOTE_OPTIONS`.

    Attributes:
        health: the server's own description.
        range: (lowest, highest) score that the server declares; infinite where it declares no bound.

    Raises:
        RewardError: GET /health does not answer as the protocol says; names the URL.
    """

    def __init__(self, who: str, settings: Mapping[str, Any]) -> None:
        self._who, self._settings = who, settings
        self._http = HttpClient(settings["url"], who=who, **{key: settings[key] for key in CONNECTION})
        self.health = self._read_health()
        low, high = self.health["range"]
        self.range = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
        self._batch = min(settings["batch_size"], self.health.get("max_batch") or settings["batch_size"])

    @property
    def url(self) -> str:
        return self._http.base_url

    def _read_health(self) -> dict[str, Any]:
        health = self._http.get("/health")
        problem = None
        if not isinstance(health, dict) or not isinstance(health.get("name"), str):
            problem = 'no "name" of a reward'
        elif health.get("scope") not in ("sample", "group"):
            problem = f'"scope" is {_shown(health.get("scope"))}, not "sample" or "group"'
        elif not (isinstance(health.get("range"), list) and len(health["range"]) == 2
                  and all(bound is None or (_is_number(bound) and is_finite(bound)) for bound in health["range"])
                  and (None in health["range"] or health["range"][0] < health["range"][1])):
            problem = f'"range" is {_shown(health.get("range"))}, not [low, high] (null where there is no bound)'
        elif not (health.get("max_batch") is None
                  or (_is_number(health["max_batch"]) and isinstance(health["max_batch"], int) and health["max_batch"] >= 1)):
            problem = f'"max_batch" is {_shown(health["max_batch"])}, not a number of images'
        if problem:
            raise RewardError(f"reward {self._who}: {self.url}/health is not that of a reward server: {problem}")
        return health

    def self_test_case(self) -> SelfTest | None:
        """The served reward's own known images; None where the server has none."""
        try:
            case = self._http.get("/v1/self_test")
        except HttpError as error:
            if error.status == 404:
                return None
            raise
        if case is None:
            return None
        try:
            images = np.stack([from_png(text, max_pixels=MAX_PIXELS) for text in case["images"]])
            test = SelfTest(images, tuple(case["prompts"]), tuple(case["metadata"]), bool(case["ordered"]))
            if not len(images) == len(test.prompts) == len(test.metadata):
                raise ValueError(f"{counted(len(images), 'image')}, {counted(len(test.prompts), 'prompt')} and "
                                 f"{len(test.metadata)} metadata do not pair up")
            if not all(isinstance(text, str) for text in test.prompts) or not all(isinstance(m, dict) for m in test.metadata):
                raise ValueError("prompts are texts, and metadata objects")
            return test
        except (KeyError, TypeError, ValueError) as error:
            raise RewardError(f"reward {self._who}: {self.url}/v1/self_test holds no images: {error!r}") from None

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]],
        group_ids: Sequence[int] | None,
    ) -> dict[str, np.ndarray]:
        """See `Reward.score`; the first key is `who`."""
        n, step = check_batch(images, prompts, metadata), self._batch
        if self.health["scope"] == "group":
            step, allowed = max(n, 1), self.health.get("max_batch") or n
            if n > allowed:
                raise RewardError(f"reward {self._who}: a group of {counted(n, 'image')}, and {self.url} takes "
                                  f"{allowed} at a time; start it with a larger --max-batch")
        parts = [self._ask(images[i : i + step], list(prompts[i : i + step]), [dict(m) for m in metadata[i : i + step]],
                           None if group_ids is None else [int(g) for g in group_ids[i : i + step]])
                 for i in range(0, n, step)]
        if any(list(part) != list(parts[0]) for part in parts):
            raise RewardError(f"reward {self._who}: {self.url} names other scores from batch to batch: "
                              f"{[list(part) for part in parts]}")
        if not parts:
            return {self._who: np.zeros(0, np.float32)}
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def _ask(
        self, images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]], group_ids: list[int] | None,
    ) -> dict[str, np.ndarray]:
        body = {"images": [to_base64(to_png(image)) for image in images], "prompts": prompts, "metadata": metadata,
                "group_ids": group_ids}
        answer = self._http.post("/v1/score", body)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, dict) or not scores:
            raise RewardError(f'reward {self._who}: the answer of {self.url}/v1/score has no "scores": {str(answer)[:200]}')
        served = self.health["name"]
        wanted = self._settings["score"] or served
        if wanted not in scores:
            raise RewardError(f"reward {self._who}: {self.url} gives no score {wanted!r}{nearest(wanted, scores)}; "
                              "option score names the one to take")
        arrays = {self._who: self._array(wanted, scores[wanted], len(prompts))}
        sources = {self._who: wanted}
        for key in scores:
            if key == wanted:
                continue
            name = f"{self._who}_{key.removeprefix(f'{served}_')}"
            if name in arrays:
                raise RewardError(f"reward {self._who}: {self.url} gives the scores {sources[name]!r} and {key!r}, which would "
                                  f"both be named {name}")
            arrays[name], sources[name] = self._array(key, scores[key], len(prompts)), key
        return arrays

    def _array(self, key: str, values: Any, n: int) -> np.ndarray:
        """float32 [n] of one list of scores."""
        where = f"reward {self._who}: {key!r} from {self.url}"
        if not isinstance(values, list) or len(values) != n:
            got = counted(len(values), "score") if isinstance(values, list) else f"a {type(values).__name__}"
            raise RewardError(f"{where} is {got} for {counted(n, 'image')}")
        wrong = [i for i, value in enumerate(values) if not (_is_number(value) and abs(value) <= LARGEST)]
        if wrong:
            raise RewardError(f"{where} is {_shown(values[wrong[0]])}, no score, at {wrong[:10]} of {counted(n, 'image')}")
        return np.asarray(values, np.float32)


class RemoteReward(Reward):
    """The reward of a server. Its range is the one that the server declares for the served reward's own score."""

    name: ClassVar[str] = "remote"
    range: tuple[float, float] = (-math.inf, math.inf)
    needs: ClassVar[tuple[str, ...]] = ("server",)
    packages: ClassVar[tuple[str, ...]] = ("requests", "pillow")
    licence: ClassVar[str] = "that of the served reward"
    description: ClassVar[str] = "A reward behind HTTP, as `flowgrpo-ray serve-reward` serves it"
    options: ClassVar[dict[str, Option]] = REMOTE_OPTIONS

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._client = RewardClient(self.name, self.settings)
        served = self._client.health
        if self.settings["score"] in (None, served["name"]):  # of its other scores a server declares no range
            self.range = self._client.range
        self.max_group = served.get("max_batch")
        if served["scope"] != self.scope:
            right = "remote_group" if served["scope"] == "group" else "remote"
            raise RewardError(f"reward {self.name}: {self._client.url} serves {served['name']}, which is scored per "
                              f"{served['scope']}; use the reward {right}")

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """See `Reward.conflicts`."""
        problem = url_problem("url", settings["url"], EXAMPLE_URL)
        return [problem] if problem else []

    @classmethod
    def longest_wait(cls, settings: Mapping[str, Any]) -> float:
        """See `Reward.longest_wait`."""
        return longest_wait(settings)

    @classmethod
    def requests_in_turn(cls, settings: Mapping[str, Any], images: int) -> int:
        """See `Reward.requests_in_turn`; more where the server takes fewer images than `batch_size`."""
        return 1 if cls.scope == "group" else math.ceil(images / settings["batch_size"])

    @classmethod
    def check_prompt(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> str | None:
        """See `Reward.check_prompt`."""
        return json_problem(metadata)

    def self_test_case(self) -> SelfTest | None:
        """The served reward's own images, sent as any others are."""
        return self._client.self_test_case()

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """`remote`, and the served reward's monitors as `remote_…`. See `Reward.score`."""
        return self._client.score(images, prompts, metadata, group_ids)


class RemoteGroupReward(RemoteReward):
    """The reward of a server that scores whole groups."""

    name: ClassVar[str] = "remote_group"
    scope: ClassVar[Literal["sample", "group"]] = "group"
    description: ClassVar[str] = "As remote, for a served reward that scores whole groups"


def _shown(value: Any) -> str:
    """A value, for an error: the start of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({len(text)} characters)"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
