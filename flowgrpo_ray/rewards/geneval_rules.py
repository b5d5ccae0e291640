"""The rules of GenEval (arXiv 2310.11513) as functions of detections: object counts, colours, positions.

A prompt's metadata says what has to be in the picture:

    {"tag": "position", "include": [{"class": "bench", "count": 1},
                                    {"class": "dog", "count": 1, "position": ["right of", 0]}], "exclude": []}

`include` and `exclude` are lists of {"class", "count"}; an included one may ask for a "color" and for a "position"
[relation, index of an earlier item of `include`]. `exclude` names classes that must stay below a count. The soft score is the
share of requirements that are met, the strict one is 1 where all are, as GenEval counts a picture.
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
    """soft: share of requirements met, in [0, 1]; strict: 1.0 where all are met, else 0.0; reasons: what is missing."""

    soft: float
    strict: float
    reasons: tuple[str, ...]


def metadata_problem(metadata: Mapping[str, Any]) -> str | None:
    """Why a picture cannot be judged by this metadata, or None. Null fields, as Parquet files have them, are as absent."""
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
        return f"has the count {count!r}; it has to be a whole number from 1"
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
    """Judge a picture.

    The requirements are: for every included item its count, its colour where it asks for one, its position where it asks
    for one; and every excluded class that no item includes. They are met to a degree:

    - count n, asked k, with at most `m` where the class is excluded from m + 1 on: max(0, 1 - (distance of n to
      [k, m]) / k), as in arXiv 2505.05470, so that soft scores of counting prompts are graded;
    - colour: of the k surest objects, the share of k that has it;
    - position: 1 where count and colour are met and the relation holds between each of the k surest objects and each
      of the target's, else 0.

    Args:
        detections: all objects found in the picture.
        metadata: of the prompt, right by `metadata_problem`.
        colours_of: names the colours (of `COLOURS`) of objects of a class.
    """
    found = by_class(detections, metadata["tag"])
    limits = {item["class"]: item["count"] - 1 for item in metadata.get("exclude") or []}
    degrees, reasons, matched = [], [], []

    def require(degree: float, reason: str) -> bool:
        degrees.append(degree)
        if degree < 1:
            reasons.append(reason)
        return degree >= 1

    for item in metadata["include"]:
        name, k = item["class"], item["count"]
        objects, most = found.get(name, []), limits.get(name)
        n = len(objects)
        away = max(k - n, 0 if most is None else n - most, 0)
        met = require(max(0.0, 1 - away / k), f"{name}: {n} found, {_asked(k, most)} asked for")
        objects = objects[:k]
        if (colour := item.get("color")) is not None:
            seen = list(colours_of(name, objects)) if objects else []
            met &= require(seen.count(colour) / k, f"{name}: {', '.join(seen) or 'nothing'} found, {k} {colour} asked for")
        if item.get("position") is not None:
            relation, target = item["position"][0], matched[int(item["position"][1])]
            holds = met and target is not None and all(relation in relations(a, b) for a in objects for b in target)
            met &= require(float(holds), f"{name}: not {relation} item {item['position'][1]} of include")
        matched.append(objects if met else None)
    for name in limits.keys() - {item["class"] for item in metadata["include"]}:
        n = len(found.get(name, []))
        require(float(n <= limits[name]), f"{name}: {n} found, {limits[name]} allowed")
    return Verdict(sum(degrees) / len(degrees), float(all(degree >= 1 for degree in degrees)), tuple(reasons))


def _asked(least: int, most: int | None) -> str:
    return f"{least} or more" if most is None else f"{least}" if least == most else f"{least} to {most}"
