"""The rules of GenEval (arXiv 2310.11513) as functions of detections: object counts, colours, positions.

A prompt's metadata says what must be in the image:

    {"tag": "position", "include": [{"class": "bench", "count": 1},
                                    {"class": "dog", "count": 1, "position": ["right of", 0]}], "exclude": []}

`include` and `exclude` are lists of {"class", "count"}; an included one may ask for a "color" and for a "position"
[relation, index of an earlier item of `include`]. `exclude` names classes that must stay below a count. There are two gradings
of an image: the benchmark's own, all or nothing, and the graded one that Flow-GRPO is trained with (arXiv 2505.05470); `judge`
has the rules of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowgrpo_ray.errors import nearest

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
CONFIDENCE = 0.3  # smallest confidence of a detection that counts
COUNTING_CONFIDENCE = 0.9  # the same for prompts with the tag "counting"
MOST_OBJECTS = 16  # detections per class that are looked at, by confidence
FLOW_GRPO_RANGE = (2.0 - MOST_OBJECTS, 1.0)  # the lowest: as many as are looked at, where one is asked for
POSITION_MARGIN = 0.1  # share of both boxes' sizes that a distance has to exceed

EXAMPLE = '{"tag": "counting", "include": [{"class": "dog", "count": 2}], "exclude": [{"class": "dog", "count": 3}]}'


@dataclass(frozen=True)
class Detection:
    """One object: its class, confidence in [0, 1], box (left, top, right, bottom) in pixels, and bool [H, W] mask or None."""

    label: str
    confidence: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Verdict:
    """flow_grpo: the graded score, in `FLOW_GRPO_RANGE`; geneval: 1.0 where the benchmark takes the image for right, else
    0.0; reasons: why it does not."""

    flow_grpo: float
    geneval: float
    reasons: tuple[str, ...]


def metadata_problem(metadata: Mapping[str, Any]) -> str | None:
    """Why an image cannot be judged by this metadata, or None. Null fields, as Parquet files have them, are as absent."""
    include, exclude = metadata.get("include") or [], metadata.get("exclude") or []
    if not isinstance(metadata.get("tag"), str):
        return f"the metadata has no tag; an example is {EXAMPLE}"
    if not isinstance(include, (list, tuple)) or not isinstance(exclude, (list, tuple)):
        return f"include and exclude are lists of objects; an example is {EXAMPLE}"
    if not include:
        return f"the metadata includes no object; an example is {EXAMPLE}"
    for i, item in enumerate(include):
        problem = _item_problem(item) or _extras_problem(item, i)
        if problem:
            return f"include[{i}] {problem}"
    for i, item in enumerate(exclude):
        if problem := _item_problem(item):
            return f"exclude[{i}] {problem}"
        low = max((known["count"] for known in include if known["class"] == item["class"]), default=0)
        if item["count"] <= low:
            return f"exclude[{i}] allows fewer than {item['count']} of {item['class']!r}, and include asks for {low}"
    return None


def _item_problem(item: Any) -> str | None:
    if not isinstance(item, Mapping):
        return f"is a {type(item).__name__}, not an object such as {EXAMPLE}"
    if not isinstance(item.get("class"), str):
        return f"has no class (its keys are {', '.join(map(str, item))})"
    count = item.get("count")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return f"has the count {count!r}; it must be a whole number from 1"
    return None


def _extras_problem(item: Mapping[str, Any], index: int) -> str | None:
    colour, position = item.get("color"), item.get("position")
    if colour is not None and colour not in COLOURS:
        return f"has the color {colour!r}{nearest(str(colour), COLOURS)}"
    if position is None:
        return None
    if not isinstance(position, (list, tuple)) or len(position) != 2:
        return f"has the position {position!r}, not [relation, index of an earlier item]"
    relation, target = position
    if relation not in RELATIONS:
        return f"has the relation {relation!r}{nearest(str(relation), RELATIONS)}"
    target = int(target) if isinstance(target, str) and target.isdigit() else target
    if not isinstance(target, int) or isinstance(target, bool) or not 0 <= target < index:
        return f"is {relation} item {target!r}, which is no earlier item of include"
    return None


def classes_of(metadata: Mapping[str, Any]) -> list[str]:
    """The classes that the metadata names, each once."""
    items = [*(metadata.get("include") or []), *(metadata.get("exclude") or [])]
    return list(dict.fromkeys(item["class"] for item in items))


def by_class(detections: Sequence[Detection], tag: str) -> dict[str, list[Detection]]:
    """The detections that count for a prompt of this tag, by class, the surest first; at most `MOST_OBJECTS` of a class."""
    threshold = COUNTING_CONFIDENCE if tag == "counting" else CONFIDENCE
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.confidence):
        if detection.confidence > threshold:
            found.setdefault(detection.label, []).append(detection)
    return {label: objects[:MOST_OBJECTS] for label, objects in found.items()}


def relations(a: Detection, b: Detection) -> set[str]:
    """Where `a` lies as seen from `b`: of `RELATIONS`, up to two, or none where they are too close.

    The distance of the centres, less `POSITION_MARGIN` times both sizes, counts in an axis where it is more than half
    the full distance.
    """
    boxes = np.asarray([a.box, b.box], np.float64).reshape(2, 2, 2)
    centres, sizes = boxes.mean(axis=1), np.abs(boxes[:, 1] - boxes[:, 0])
    offset = centres[0] - centres[1]
    beyond = np.maximum(np.abs(offset) - POSITION_MARGIN * sizes.sum(axis=0), 0.0)
    if (beyond < 1e-3).all():
        return set()
    x, y = np.sign(offset) * beyond / np.linalg.norm(offset)
    names = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in names.items() if holds}


def judge(
    detections: Sequence[Detection], metadata: Mapping[str, Any],
    colours_of: Callable[[str, Sequence[Detection]], Sequence[str]],
) -> Verdict:
    """Judge an image, in both gradings.

    `geneval`, the benchmark's own (arXiv 2310.11513): of every included item there are at least the k objects that are asked
    for, the k surest have its colour, and its relation holds between each of them and each of the target's, which must be
    right itself; and every clause of `exclude` holds.

    `flow_grpo`, the reward of arXiv 2505.05470 with the numbers of its published server (`evaluate_reward` of
    github.com/yifan123/reward-server): the mean of the parts that every included item adds in its turn, where n objects are
    found and k asked for.

    - Count: 1 - |n - k| / k. It is not cut off at 0: five where one is asked for are -3.
    - Where n is not k: one 0 more if the item asks for a colour, a position or both.
    - Where n is k, the colour: the share of the k objects that has it.
    - Where n is k and all have the colour, the position: 0 where not all parts of the target's item are 1; otherwise 1 where
      the relation holds, and two parts, 0 and 1, where it does not.

    `exclude` has no part in it: a class that must not be there costs nothing, and too many of one that must be there cost by
    their count, also where no clause excludes them.

    Args:
        detections: all objects found in the image.
        metadata: of the prompt, right by `metadata_problem`.
        colours_of: names the colours (of `COLOURS`) of objects of a class.
    """
    found = by_class(detections, metadata["tag"])
    parts: list[float] = []
    reasons: list[str] = []
    right_objects: list[Sequence[Detection] | None] = []  # by item: the k surest where the item is right, else None
    exactly: list[bool] = []  # by item: it is right by the rules of flow_grpo
    for item in metadata["include"]:
        name, k, colour, position = item["class"], item["count"], item.get("color"), item.get("position")
        objects = found.get(name, [])
        n, objects = len(objects), objects[:k]
        right, exact = n >= k, n == k
        parts.append(_likeness(n, k))
        if not exact and (colour is not None or position is not None):
            parts.append(0.0)
        if not right:
            reasons.append(f"{name}: {n} found, {k} or more asked for")
        if right and colour is not None:
            seen = list(colours_of(name, objects))
            right = seen.count(colour) == k
            if exact:
                parts.append(_likeness(seen.count(colour), k))
            if not right:
                reasons.append(f"{name}: {', '.join(seen)} found, {k} {colour} asked for")
        if right and position is not None:
            relation, target = position[0], int(position[1])
            others = right_objects[target]
            right = others is not None and all(relation in relations(a, b) for a in objects for b in others)
            if exact:
                parts += [0.0] if not exactly[target] else [1.0] if right else [0.0, 1.0]
                exact = exactly[target]
            if not right:
                reasons.append(f"{name}: not {relation} item {target} of include")
        right_objects.append(objects if right else None)
        exactly.append(right and exact)
    for item in metadata.get("exclude") or []:
        if (n := len(found.get(item["class"], []))) >= item["count"]:
            reasons.append(f"{item['class']}: {n} found, {item['count'] - 1} allowed")
    return Verdict(sum(parts) / len(parts), float(not reasons), tuple(reasons))


def _likeness(n: int, k: int) -> float:
    return 1 - abs(n - k) / k
