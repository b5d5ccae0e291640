"""geneval: are the objects that the prompt asks for in the image, in number, colour and place (arXiv 2310.11513)?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from flowgrpo_ray.rewards.base import (
    GroupIds,
    HubSource,
    Metadata,
    Option,
    Reward,
    RewardError,
    Scores,
    SelfTest,
    check_batch,
    check_range,
)
from flowgrpo_ray.rewards.geneval_rules import FLOW_GRPO_RANGE, Detection, Verdict, classes_of, judge, metadata_problem
from flowgrpo_ray.rewards.http_client import longest_wait, url_problem
from flowgrpo_ray.rewards.remote import EXAMPLE_URL, REMOTE_OPTIONS, RewardClient, check_served, json_problem, within

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
GENEVAL_RANGE = (0.0, 1.0)
LOCAL_ONLY = ("grading", "class_names", "clip", "revision")
PER_REQUEST = REMOTE_OPTIONS["batch_size"].default
REMOTE_ONLY = ("score", "timeout_s", "retries", "backoff_s")


class GenEval(Reward):
    """How much of what the prompt asks for is in the image (rules, gradings and metadata: geneval_rules.py).

    With `url` a reward server scores; with `detector` this process does, with a detector and a CLIP of transformers. The
    range is that of `grading`; of a server's score it is what the server declares, within the range of flow_grpo.
    """

    name: ClassVar[str] = "geneval"
    range: tuple[float, float] = FLOW_GRPO_RANGE
    device: ClassVar[Literal["cpu", "any"]] = "any"
    needs: ClassVar[tuple[str, ...]] = ("tag", "include", "exclude")
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers", "pillow", "requests")
    licence: ClassVar[str] = "rules MIT (GenEval); Mask2Former and CLIP weights MIT"
    description: ClassVar[str] = "Objects, counts, colours and positions of a GenEval prompt (monitor: all right)"
    options: ClassVar[dict[str, Option]] = {
        "detector": Option(None, f"Score here: folder or hub name of a detector of transformers, for example {DETECTOR}",
                           path=True),
        "grading": Option("flow_grpo", "With detector: flow_grpo, graded as Flow-GRPO's reward server does, below 0 for counts "
                          "that are far off; or geneval, the benchmark's own, 1 where all is right, else 0",
                          choices=("flow_grpo", "geneval")),
        "clip": Option("openai/clip-vit-large-patch14", "With detector: folder or hub name of the CLIP that names colours",
                       path=True),
        "revision": Option(None, "With detector: its hub revision"),
        "class_names": Option({}, "With detector: its names for the prompts' classes, for example {tv: television}", kind=dict),
        **REMOTE_OPTIONS,
        "url": Option(None, f"Score on a server: address of `flowgrpo-ray serve-reward geneval`, for example {EXAMPLE_URL}",
                      infrastructure=True),
        "batch_size": Option(None, "Images per request (default 16), or per forward pass of the detector (default 4)",
                             kind=int, minimum=1),
    }

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        s = self.settings
        self._client: RewardClient | None = None
        if s["url"] is not None:
            self._client = RewardClient(self.name, s | {"batch_size": s["batch_size"] or PER_REQUEST})
            served = self._client.health
            if served["scope"] != "sample":
                raise RewardError(f"reward geneval: {s['url']} serves {served['name']}, which scores whole groups")
            if s["score"] in (None, served["name"]):  # of its other scores a server declares no range
                check_served(self.name, self._client, self._foreign(served, self._client.range))
                low, high = np.clip(self._client.range, *self.range).tolist()
                self.range = low, high
            return
        if s["grading"] == "geneval":
            self.range = GENEVAL_RANGE
        from flowgrpo_ray.rewards.geneval_models import ColourClassifier, TransformersDetector

        self._detector = TransformersDetector(s["detector"], s["revision"], batch_size=s["batch_size"] or 4)
        self._colours = ColourClassifier(s["clip"])
        self.notes += self._colours.notes

    def _foreign(self, served: Mapping[str, Any], declared: tuple[float, float]) -> str | None:
        """Why a server is not one of geneval, or None. By another name it may be one, of any make: then its range lies inside
        geneval's, and if it says what metadata it needs it names those of a GenEval prompt."""
        (low, high), (first, last) = self.range, declared
        if served["name"] == self.name:
            return None if first < high and low < last else f"geneval's scores are in {low:g} to {high:g}"
        if not within((first, last), self.range):
            return f"its name is not geneval, nor is its range inside that of geneval, {low:g} to {high:g}"
        needs = served.get("needs")
        if isinstance(needs, list) and "include" not in needs:
            return "its name is not geneval, nor does it need the metadata of a GenEval prompt"
        return None

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """See `Reward.conflicts`."""
        if (settings["url"] is None) == (settings["detector"] is None):
            return [f"give option url (a reward server, such as {EXAMPLE_URL}) or option detector (to score here, such as "
                    f"{DETECTOR}), one of the two"]
        if settings["url"] is not None and (problem := url_problem("url", settings["url"], EXAMPLE_URL)):
            return [problem]
        here, unused = ("url", LOCAL_ONLY) if settings["url"] is not None else ("detector", REMOTE_ONLY)
        return [f"option {key} means nothing with {here}" for key in unused if settings[key] != cls.options[key].default]

    @classmethod
    def hub_sources(cls, settings: Mapping[str, Any]) -> list[HubSource]:
        """See `Reward.hub_sources`; on a server nothing is loaded here."""
        return super().hub_sources(settings) if settings["detector"] is not None else []

    @classmethod
    def longest_wait(cls, settings: Mapping[str, Any]) -> float:
        """See `Reward.longest_wait`."""
        return 0.0 if settings["url"] is None else longest_wait(settings)

    @classmethod
    def requests_in_turn(cls, settings: Mapping[str, Any], images: int) -> int:
        """See `Reward.requests_in_turn`."""
        return 1 if settings["url"] is None else math.ceil(images / (settings["batch_size"] or PER_REQUEST))

    @classmethod
    def check_prompt(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> str | None:
        """See `Reward.check_prompt`."""
        if problem := metadata_problem(metadata):
            return f"geneval needs the metadata of a GenEval prompt: {problem}"
        return json_problem(metadata) if options.get("url") is not None else None

    def self_test_case(self) -> SelfTest | None:
        """A server's own images; here two that only have to be scored: no drawn object is known to every detector."""
        if self._client is not None:
            return self._client.self_test_case()
        images = np.stack([np.full((64, 64, 3), 128, np.uint8),
                             np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)])
        label = min(self._detector.labels)
        metadata = {"tag": "colors", "include": [{"class": label, "count": 1, "color": "red"}]}
        return SelfTest(images, (f"a photo of a red {label}",) * 2, (metadata,) * 2, ordered=False)

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """`geneval`: as `grading` says; monitor `geneval_strict`: 1 where the benchmark takes the image for right, else 0.
        See `Reward.score`."""
        check_batch(images, prompts, metadata)
        for prompt, extra in zip(prompts, metadata, strict=True):
            if problem := self.check_prompt(prompt, extra):
                raise RewardError(f"prompt {prompt!r}: {problem}")
        if self._client is not None:
            scores = self._client.score(images, prompts, metadata, group_ids)
            if (strict := f"{self.name}_strict") in scores:  # a declared range is not that of the monitors
                check_range(scores[strict], strict, GENEVAL_RANGE)
            return scores
        verdicts = [self._judge(image, found, extra)
                    for image, found, extra in zip(images, self._detector.detect(images), metadata, strict=True)]
        return {self.name: np.asarray([getattr(verdict, self.settings["grading"]) for verdict in verdicts], np.float32),
                f"{self.name}_strict": np.asarray([verdict.geneval for verdict in verdicts], np.float32)}

    def _judge(self, image: np.ndarray, found: Sequence[Detection], metadata: Mapping[str, Any]) -> Verdict:
        """The verdict on one image; its detections get the prompt's names of classes."""
        from dataclasses import replace

        from flowgrpo_ray.rewards.geneval_models import name_of

        own = self.settings["class_names"]
        names = {wanted: name_of(wanted, self._detector.labels, own) for wanted in classes_of(metadata)}
        renamed = [replace(detection, label=wanted) for wanted, name in names.items() for detection in found
                   if detection.label == name]
        return judge(renamed, metadata, lambda name, objects: self._colours.colours(image, name, objects))
