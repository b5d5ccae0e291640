"""The image grids of a run, read again: one image against another at the same noise, the best and the worst."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_ray import storage
from flowgrpo_ray.run_dir.sample_table import GridImage, list_grids, read_grid
from flowgrpo_ray.run_dir.watch import combine_of, weights_of
from flowgrpo_ray.views.page import inline

GRIDS_SHOWN = 6  # steps at which whole grids are shown, the first and the last among them
_GRID_WIDTH, _SHOT_WIDTH = 1280, 420  # pixels; wider ones are scaled down


@dataclass(frozen=True)
class Grid:
    """A whole grid, as a data URI."""

    weights: str
    step: int
    image: str


@dataclass(frozen=True)
class Shot:
    """One image for a page: data URI, what it is, and its scores in the order of the configuration."""

    image: str
    label: str
    scores: list[tuple[str, float]]
    small: bool  # few pixels: shown without smoothing


@dataclass(frozen=True)
class Pair:
    """Images of one prompt and one noise."""

    prompt: str
    shots: tuple[Shot, ...]

    @property
    def scores(self) -> list[tuple[str, list[float | None]]]:
        """(name, value in each shot) of every score."""
        known = [dict(shot.scores) for shot in self.shots]
        return [(name, [scores.get(name) for scores in known]) for name in dict.fromkeys(n for s in known for n in s)]


def whole_grids(run_dir: str) -> list[tuple[int, list[Grid]]]:
    """Sample grids by step: first, last, and a few steps spread evenly between them."""
    by_step = [(step, list(found)) for step, found in groupby(list_grids(run_dir), key=lambda grid: grid[1])]
    if len(by_step) > GRIDS_SHOWN:
        places = {round(i * (len(by_step) - 1) / (GRIDS_SHOWN - 1)) for i in range(GRIDS_SHOWN)}
        by_step = [by_step[i] for i in sorted(places)]
    return [(step, [Grid(weights, step, inline(storage.read_bytes(uri), _GRID_WIDTH)) for weights, _, uri in found[::-1]])
            for step, found in by_step]  # reversed: policy before ema


def ends(run_dir: str, weights: str) -> list[tuple[int, list[GridImage]]]:
    """(step, images) of the first and the last grid; at the start both kinds of weights are one, so `policy` stands in."""
    found = list_grids(run_dir)
    own = [(step, uri) for kind, step, uri in found if kind == weights]
    first = [(step, uri) for kind, step, uri in found if kind == "policy"][:1] or own[:1]
    picked = dict([*first, *own[-1:]])
    return [(step, read_grid(storage.read_bytes(uri))) for step, uri in picked.items()]


def same_noise(*images: Sequence[GridImage]) -> list[tuple[GridImage, ...]]:
    """Images that occur in every list with one prompt, seed and size, in the order of the first list."""
    known = [{item.key: item for item in some if item.seed is not None} for some in images]
    found = [tuple(some[key] for some in known) for key in known[0] if all(key in some for some in known)]
    return [items for items in found if len({Image.open(io.BytesIO(item.png)).size for item in items}) == 1]


def difference(a: GridImage, b: GridImage) -> float:
    """Mean absolute difference of two images of one size, in 8-bit steps (0..255)."""
    first, second = (np.asarray(Image.open(io.BytesIO(item.png)).convert("RGB"), np.int16) for item in (a, b))
    return float(np.abs(first - second).mean())


def shot(item: GridImage, label: str, rewards: Sequence[str] = ()) -> Shot:
    """An image for a page; scores of `rewards` come first."""
    order = [name for name in rewards if name in item.scores] + [name for name in item.scores if name not in rewards]
    return Shot(inline(item.png, _SHOT_WIDTH), label, [(name, item.scores[name]) for name in order],
                Image.open(io.BytesIO(item.png)).width < 256)


def ranked(images: Sequence[GridImage], config: Mapping[str, Any]) -> list[tuple[float, GridImage]]:
    """(total, image) of the images that have every optimised score, best first. Under `gdpo` each score is normalised over
    these images before it is weighted."""
    weights = {name: weight for name, weight in weights_of(config).items() if weight}
    scored = [item for item in images if weights and all(name in item.scores for name in weights)]
    if not scored:
        return []
    columns = {name: np.array([item.scores[name] for item in scored]) for name in weights}
    if combine_of(config) == "gdpo" and len(weights) > 1:
        columns = {name: (values - values.mean()) / (values.std() + 1e-4) for name, values in columns.items()}
    totals = np.sum([weights[name] * values for name, values in columns.items()], axis=0)
    order = sorted(range(len(scored)), key=lambda i: (-totals[i], i))
    return [(float(totals[i]), scored[i]) for i in order]
