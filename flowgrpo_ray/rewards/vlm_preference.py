"""vlm_preference: within a group, how often a vision-language model prefers an image to another (arXiv 2508.20751)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from flowgrpo_ray.errors import counted
from flowgrpo_ray.rewards.base import GroupIds, Metadata, Option, RewardError, Scores, SelfTest, check_batch, red_above_blue
from flowgrpo_ray.rewards.vlm_chat import CHAT_OPTIONS, ChatReward, object_schema, parser_problem, template_problem

TEMPLATE = """\
Both images were made for this text:

{prompt}

Which one is better? What counts first is that it shows everything that the text names: objects, their number, their attributes,
where they are, and any writing. Where both do that equally well, the one with fewer visible faults is better.

Answer with JSON only, {"better": "first"} or {"better": "second"}. Where you see no difference at all, and only there, answer
{"better": "tie"}."""

# What a reply may say, in lower case: points of the image that was shown first.
ANSWERS = {"first": 1.0, "1": 1.0, "image 1": 1.0, "second": 0.0, "2": 0.0, "image 2": 0.0, "tie": 0.5, "0": 0.5}


def pairs_of(n: int, most: int | None) -> list[tuple[int, int]]:
    """Which of n images are compared: all pairs, or the first `most` of a fixed order that spreads them evenly.

    The order goes round the group: neighbours first (every other pair of them, then those between), then images two apart,
    and so on. So every image is in a pair from `most` = n / 2, rounded up, on.

    Raises:
        RewardError: fewer than two images, or `most` leaves one of them out.
    """
    if n < 2:
        raise RewardError(f"reward vlm_preference compares images of a group, and this one has {n}")
    if most is not None and most < (n + 1) // 2:
        raise RewardError(f"reward vlm_preference: max_pairs {most} leaves images of a group of {n} out; use "
                          f"at least {(n + 1) // 2}")
    order: dict[tuple[int, int], None] = {}
    for apart in range(1, n // 2 + 1):
        starts = [*range(0, n, 2), *range(1, n, 2)] if apart == 1 else range(n)
        for i in starts:
            j = (i + apart) % n
            order.setdefault((min(i, j), max(i, j)))
    return list(order)[:most]


class VlmPreference(ChatReward):
    """The share of comparisons that an image wins in its group, in [0, 1].

    Each pair is judged twice, once in either order, so that a liking for the first or the second place cancels out; a tie
    is half a win. A group costs 2 * pairs requests: 552 for 24 images, unless `max_pairs` bounds it. One reply without a
    verdict fails the group: a rate over other pairs would not be comparable.
    """

    name: ClassVar[str] = "vlm_preference"
    range: tuple[float, float] = (0.0, 1.0)
    scope: ClassVar[Literal["sample", "group"]] = "group"
    description: ClassVar[str] = "Win rate within the group, pairs judged by a vision-language model"
    options: ClassVar[dict[str, Option]] = {
        **CHAT_OPTIONS,
        "template": Option(TEMPLATE, "What the model is asked about two images; {prompt} stands for the text prompt"),
        "parser": Option("json:better", "Where the verdict is in a reply: json:FIELD, or regex:PATTERN (one group; of several "
                         "matches that differ the last, which must begin a line). It is first, 1 or image 1; second, 2 or "
                         "image 2; tie or 0"),
        "max_pairs": Option(None, "Most pairs per group; default is all. At least half the group's size", kind=int, minimum=1),
    }

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """See `Reward.conflicts`."""
        problems = [template_problem(settings["template"], ["prompt"], ["prompt"]), parser_problem(settings["parser"])]
        return [*(problem for problem in problems if problem), *super().conflicts(settings)]

    @classmethod
    def group_problem(cls, settings: Mapping[str, Any], size: int) -> str | None:
        """See `Reward.group_problem`."""
        try:
            pairs_of(size, settings["max_pairs"])
        except RewardError as error:
            return str(error)
        return None

    @classmethod
    def requests_of(cls, settings: Mapping[str, Any], images: int) -> int:
        """See `ChatReward.requests_of`."""
        return 2 * len(pairs_of(images, settings["max_pairs"]))

    def schema(self) -> dict[str, Any]:
        """See `ChatReward.schema`."""
        field = self.settings["parser"].removeprefix("json:")
        return object_schema(field, {"type": "string", "enum": ["first", "second", "tie"]})

    def self_test_case(self) -> SelfTest:
        """A red image is preferred to a blue one where red is asked for; with another template both only get a rate."""
        return red_above_blue(ordered=self.settings["template"] == TEMPLATE)

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """See `Reward.score`; RewardError also without `group_ids`, or where a group has several prompts."""
        n = check_batch(images, prompts, metadata)
        if group_ids is None:
            raise RewardError("reward vlm_preference scores whole groups and was given no group_ids")
        if len(group_ids) != n:
            raise RewardError(f"{len(group_ids)} group_ids for {counted(n, 'image')}")
        scores = np.zeros(n, np.float64)
        for group in dict.fromkeys(group_ids):
            rows = [i for i, one in enumerate(group_ids) if one == group]
            if len({prompts[i] for i in rows}) > 1:
                raise RewardError(f"reward vlm_preference: the images of group {group} have different prompts")
            scores[rows] = self._win_rates(images[rows], prompts[rows[0]])
        return {self.name: scores.astype(np.float32)}

    def _win_rates(self, images: np.ndarray, prompt: str) -> np.ndarray:
        pairs = pairs_of(len(images), self.settings["max_pairs"])
        urls, text = [self.data_url(image) for image in images], self.settings["template"].replace("{prompt}", prompt)
        shown = [pair for a, b in pairs for pair in ((a, b), (b, a))]
        points = self.in_parallel([partial(self._compare, a, b, urls, text) for a, b in shown])
        won, games = np.zeros(len(images)), np.zeros(len(images))
        for (a, b), point in zip(shown, points, strict=True):
            won[a] += point
            won[b] += 1 - point
            games[[a, b]] += 1
        return won / games

    def _compare(self, a: int, b: int, urls: Sequence[str], text: str) -> float:
        """Points of image a, shown first, against b."""
        def read(value: Any) -> float:
            answer = str(value).strip().lower() if not isinstance(value, (bool, float)) else None
            if answer not in ANSWERS:
                raise ValueError(f"{value!r} is none of {', '.join(ANSWERS)}")
            return ANSWERS[answer]

        try:
            return self.verdict(self.ask([urls[a], urls[b]], text), read)
        except RewardError as error:
            raise RewardError(f"images {a} and {b}: {error}") from error
