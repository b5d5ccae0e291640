"""vlm_judge: a vision-language model grades each image; unified_reward and qwen_vl are presets of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from flowgrpo_ray.rewards.base import (
    GroupIds,
    Metadata,
    Option,
    RewardError,
    Scores,
    SelfTest,
    check_batch,
    is_finite,
    red_above_blue,
)
from flowgrpo_ray.rewards.vlm_chat import (
    CHAT_OPTIONS,
    ChatReward,
    object_schema,
    parser_problem,
    template_problem,
    to_number,
)

JUDGE_TEMPLATE = """\
Grade how well the image shows what this text asks for.

Text: {prompt}

Look for everything that the text names: objects, their number, their attributes, where they are, and any writing. The grade is
a number from 1 (shows none of it) to 5 (shows all of it, without visible faults).

Answer with JSON only, in this form: {"score": 3.5}"""

UNIFIED_TEMPLATE = """\
You are shown an image that was generated from the caption below.

Caption: {prompt}

Judge it by two things: how completely and correctly it shows the elements of the caption, and how good it looks, faults such as
deformed bodies or broken objects included. Take both together into one final score from 1 (worst) to 5 (best); decimals are
allowed.

End with a line of this form:
Final Score: 3.5"""

QWEN_TEMPLATE = """\
Grade the quality of this image as a critic of photographs and illustrations would: composition, light and colour, detail, and
freedom from faults such as deformed bodies, blur and broken objects. The grade is a number from 1 (poor) to 5 (excellent).

Give your reasons in two or three sentences, then end with a line of this form:
Score: 3.5"""


def _pair_problem(name: str, value: Any) -> str | None:
    numbers = isinstance(value, list) and len(value) == 2 and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and is_finite(v) for v in value)
    if not numbers or not value[0] < value[1]:
        return f"option {name} is {value!r}, not [low, high] of two finite numbers"
    return None


class VlmJudge(ChatReward):
    """(Grade - low) / (high - low), with [low, high] the option `scale`; the grade is read from the model's reply.

    A reply that is empty, does not parse, or gives a grade out of bounds raises RewardError: the image has no score.
    """

    name: ClassVar[str] = "vlm_judge"
    range: tuple[float, float] = (0.0, 1.0)
    description: ClassVar[str] = "A grade by a vision-language model on an OpenAI-compatible endpoint (vLLM, SGLang)"
    options: ClassVar[dict[str, Option]] = {
        **CHAT_OPTIONS,
        "template": Option(JUDGE_TEMPLATE, "What the model is asked; {prompt} stands for the text prompt"),
        "parser": Option("json:score", "Where the grade is in a reply: json:FIELD, number (the whole reply), or regex:PATTERN "
                         "(one group; of several matches that differ the last, which must begin a line)"),
        "scale": Option([1, 5], "[low, high]: the grades that become 0 and 1", kind=list),
        "bounds": Option(None, "[lowest, highest] grade that is right; default is the scale", kind=list),
    }
    grades_alignment: ClassVar[bool] = True  # the default template grades images by the prompt

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.range = self._score(self.bounds[0]), self._score(self.bounds[1])

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """See `Reward.conflicts`."""
        needed = ["prompt"] if cls.grades_alignment else []
        problems = [
            template_problem(settings["template"], ["prompt"], needed),
            parser_problem(settings["parser"], ["number"]),
            _pair_problem("scale", settings["scale"]),
            _pair_problem("bounds", settings["bounds"]) if settings["bounds"] is not None else None,
        ]
        return [*(problem for problem in problems if problem), *super().conflicts(settings)]

    @property
    def bounds(self) -> tuple[float, float]:
        """(lowest, highest) right grade."""
        low, high = self.settings["bounds"] or self.settings["scale"]
        return float(low), float(high)

    def _score(self, grade: float) -> float:
        low, high = self.settings["scale"]
        return (grade - low) / (high - low)

    def schema(self) -> dict[str, Any]:
        """See `ChatReward.schema`."""
        low, high = self.bounds
        return object_schema(self.settings["parser"].removeprefix("json:"), {"type": "number", "minimum": low, "maximum": high})

    def self_test_case(self) -> SelfTest:
        """A red image is a plain red image, and a blue one is not. Another template may grade something else: then
        the images only have to get a grade."""
        ordered = self.grades_alignment and self.settings["template"] == self.options["template"].default
        return red_above_blue(ordered=ordered)

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """See `Reward.score`."""
        check_batch(images, prompts, metadata)
        calls = [lambda i=i, image=image, prompt=prompt: self._grade(i, image, prompt)
                 for i, (image, prompt) in enumerate(zip(images, prompts, strict=True))]
        return {self.name: np.asarray([self._score(grade) for grade in self.in_parallel(calls)], np.float32)}

    def _grade(self, index: int, image: np.ndarray, prompt: str) -> float:
        low, high = self.bounds

        def read(value: Any) -> float:
            grade = to_number(value)
            if not low <= grade <= high:
                raise ValueError(f"{grade:g} is outside {low:g} to {high:g}")
            return grade

        try:
            reply = self.ask([self.data_url(image)], self.settings["template"].replace("{prompt}", prompt))
            return self.verdict(reply, read)
        except RewardError as error:
            raise RewardError(f"image {index}: {error}") from error


def _out_of_five(template: str, label: str) -> dict[str, Option]:
    """Options of a judge whose reply ends with a label and a grade from 1 to 5, which is divided by 5."""
    # 4.5, **4.5** and 4/5 are grades. 4,5 and 4/10 and 4-5 are not: they are matched as well, and are no number.
    grade = r"(\d+(?:\.\d+)?(?:, ?\d+| ?(?:/|out of) ?(?!5\b)\d+| ?(?:[-–]|to) ?\d+)?)"
    defaults = {"template": template, "parser": rf"regex:{label}[*_]*:[*_\s]*{grade}", "scale": [0, 5], "bounds": [1, 5]}
    return VlmJudge.options | {key: replace(VlmJudge.options[key], default=value) for key, value in defaults.items()}


class UnifiedReward(VlmJudge):
    """Final score / 5 of UnifiedReward (arXiv 2503.05236): 0.2 to 1."""

    name: ClassVar[str] = "unified_reward"
    range: tuple[float, float] = (0.2, 1.0)
    licence: ClassVar[str] = "MIT (CodeGoat24/UnifiedReward)"
    description: ClassVar[str] = "Final score / 5 of UnifiedReward on an OpenAI-compatible endpoint"
    options: ClassVar[dict[str, Option]] = _out_of_five(UNIFIED_TEMPLATE, "Final Score")


class QwenVl(VlmJudge):
    """Grade / 5 of image quality by a general model such as Qwen/Qwen2.5-VL-7B-Instruct: 0.2 to 1. The text prompt plays
    no part unless a custom template has {prompt}."""

    name: ClassVar[str] = "qwen_vl"
    range: tuple[float, float] = (0.2, 1.0)
    needs: ClassVar[tuple[str, ...]] = ("server",)
    licence: ClassVar[str] = "Apache-2.0 (Qwen2.5-VL-7B)"
    description: ClassVar[str] = "Image quality / 5 by Qwen2.5-VL on an OpenAI-compatible endpoint"
    options: ClassVar[dict[str, Option]] = _out_of_five(QWEN_TEMPLATE, "Score")
    grades_alignment: ClassVar[bool] = False
