"""Scores of image files on disk, without Ray: what `flowgrpo-ray score` does."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_ray import signals
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, counted, message_of, nearest, place_of
from flowgrpo_ray.rewards import Reward
from flowgrpo_ray.rewards.base import batch_size_of, no_exit, read_only, renamed, validated
from flowgrpo_ray.rewards.image_files import ImageError, read_rgb

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
OTHER_ENDINGS = (".gif", ".tif", ".tiff")  # images that are not read: of several frames, or of more than 8 bits
TABLE_COLUMNS = ("path", "prompt", "error")  # those that are no scores
TABLE_ENDINGS = (".parquet", ".csv", ".jsonl")
_NUMBERED = re.compile(r"(\d+)_(\d+)")  # <prompt>_<image>, as `flowgrpo-ray sample` writes them


@dataclass
class ImageFile:
    """An image file, the prompt that it belongs to (its number in the prompt file), and its scores by key."""

    path: Path
    number: int
    record: PromptRecord
    scores: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def read(self) -> np.ndarray:
        """See `read_image`. Nothing keeps the pixels: a folder may hold more of them than there is memory."""
        return read_image(self.path)

    @cached_property
    def size(self) -> tuple[int, int]:
        """(height, width). Found by decoding the whole file, once, so that a truncated one is found too; raises as `read`."""
        height, width, _ = self.read().shape
        return height, width


def find_images(folder: str | Path, records: Sequence[PromptRecord]) -> list[ImageFile]:
    """Pair the images of a folder with prompts: by the numbers in names such as `03_01.png` (prompt 3, image 1), else in the
    order of their names, one prompt each; a single prompt goes with every image.

    Raises:
        ConfigError: no such folder, no images, a number without a prompt, or counts that do not pair up.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        siblings = [str(p) for p in folder.parent.glob("*") if p.is_dir()] if folder.parent.is_dir() else []
        raise ConfigError(f"no folder at {folder}{nearest(str(folder), siblings)}")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
    if not files:
        others = other_images(folder)
        raise ConfigError(f"{folder} holds no images ({', '.join(IMAGE_ENDINGS)})"
                          + (f"; not read: {', '.join(others)}" if others else ""))
    numbered = [(int(match[1]), path) for path in files if (match := _NUMBERED.fullmatch(path.stem))]
    if len(numbered) == len(files) - sum(path.stem == "grid" for path in files) and numbered:
        beyond = [path.name for number, path in numbered if number >= len(records)]
        if beyond and len(records) > 1:
            raise ConfigError(f"{beyond[0]} is named after prompt {int(beyond[0].split('_')[0])} (counted from 0), and there "
                              f"are {len(records)} prompts")
        return [ImageFile(path, number, records[number if len(records) > 1 else 0]) for number, path in numbered]
    if len(records) == 1:
        return [ImageFile(path, 0, records[0]) for path in files]
    if len(files) != len(records):
        raise ConfigError(f"{folder} holds {counted(len(files), 'image')} for {counted(len(records), 'prompt')}; give a "
                          "prompt per image in the order of the file names, a single prompt, or names such as 03_01.png "
                          "(prompt 3, image 1)")
    return [ImageFile(path, number, record) for number, (path, record) in enumerate(zip(files, records, strict=True))]


def other_images(folder: str | Path) -> list[str]:
    """Names of the images in a folder that are of a kind that is not read."""
    return sorted(path.name for path in Path(folder).expanduser().iterdir() if path.suffix.lower() in OTHER_ENDINGS)


def read_image(path: Path) -> np.ndarray:
    """uint8 [H, W, 3], RGB. Raises ConfigError where the file is no image, or would be read wrongly."""
    try:
        return read_rgb(path)
    except ImageError as error:
        raise ConfigError(f"{path} {error}") from error


def batches_of(cls: type[Reward], options: Mapping[str, Any], images: Sequence[ImageFile]) -> list[list[ImageFile]]:
    """The images of each call of a reward; reads every one once, keeps none of them, and loads no model.

    Images of equal size go together, as many as the reward's option `batch_size` says, else its attribute; where the reward
    scores whole groups, those of one prompt.

    Raises:
        ConfigError: an image cannot be read, or the images of a group differ in size.
    """
    whole = cls.scope == "group"
    alike: dict[Any, list[ImageFile]] = {}
    for image in images:
        size = image.size
        alike.setdefault(image.number if whole else size, []).append(image)
    if whole:
        for first, *rest in alike.values():
            if other := next((image for image in rest if image.size != first.size), None):
                raise ConfigError(f"reward {cls.name} scores a group in one call, and the images of prompt "
                                  f"{first.record.prompt!r} differ in size: {_sized(first)} and {_sized(other)}")
        return list(alike.values())
    n = batch_size_of(cls, options)
    return [part[start : start + n] for part in alike.values() for start in range(0, len(part), n)]


def _sized(image: ImageFile) -> str:
    height, width = image.size
    return f"{image.path.name} is {width} x {height}"


def score_images(reward: Reward, name: str, batches: Sequence[Sequence[ImageFile]], others: Collection[str] = ()) -> None:
    """Score images in place, a call for each of the batches; the keys of their scores carry `name`.

    A batch that fails is scored again one by one (a group is not); an image that fails then has no score, and its `error`
    says why, after what it says of other rewards.

    Raises:
        ConfigError: a score is named as a column of the table, or is one of `others`, the names of other rewards' scores.
    """
    for batch in batches:
        last = len(batch) == 1 or reward.scope == "group"
        if not _scored(reward, name, batch, others, keep=last) and not last:
            for image in batch:
                _scored(reward, name, [image], others, keep=True)


def _scored(reward: Reward, name: str, rows: Sequence[ImageFile], others: Collection[str], *, keep: bool) -> bool:
    """Whether the images could be scored; where not, why is kept as their error if `keep` says so."""
    signals.check()
    try:
        with no_exit(name):
            result = reward.score(read_only(np.stack([p.read() for p in rows])), [p.record.prompt for p in rows],
                                  [p.record.reward_metadata for p in rows],
                                  group_ids=[p.number for p in rows] if reward.scope == "group" else None)
        given = validated(result, len(rows), reward.name, range=reward.range)
    except Exception as error:
        for image in rows if keep else ():
            place = "" if isinstance(error, FlowGrpoError) else f" ({place_of(error)})"
            what = f"{name}: {type(error).__name__}: {message_of(error)}{place}"
            image.error = "; ".join([*filter(None, [image.error]), what])
        return False
    scores = renamed(given, reward.name, name)
    for key, values in scores.items():
        if key in TABLE_COLUMNS:
            raise ConfigError(f"reward {name} gives a score named {key!r}, which is a column of the table; give it another "
                              "name")
        if key in others:
            raise ConfigError(f"reward {name} gives a score named {key!r}, which another reward has given; score with one of "
                              "them at a time")
        for image, value in zip(rows, values, strict=True):
            image.scores[key] = float(value)
    return True


def write_table(path: str | Path, images: Sequence[ImageFile], keys: Sequence[str]) -> None:
    """Write path, prompt, scores (null where there is none) and error of every image as .parquet, .csv or .jsonl.

    Raises:
        ConfigError: the ending is another.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    path = check_table(path)
    columns: dict[str, Any] = {"path": [str(p.path) for p in images], "prompt": [p.record.prompt for p in images]}
    columns |= {key: pa.array([p.scores.get(key) for p in images], pa.float64()) for key in keys}
    columns["error"] = pa.array([p.error for p in images], pa.string())
    table = pa.table(columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        import json

        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def check_table(path: str | Path) -> Path:
    """The path, if its ending names a kind of table; raises ConfigError."""
    path = Path(path)
    if path.suffix not in TABLE_ENDINGS:
        raise ConfigError(f"{path}: the ending says the format, one of {', '.join(TABLE_ENDINGS)}"
                          f"{nearest(path.suffix, TABLE_ENDINGS)}")
    return path


def make_room(path: str | Path) -> None:
    """Make the folder of a table, and see that the table can be written; a file that is there stays as it is.

    Raises:
        ConfigError: it cannot, and why.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = os.path.lexists(path)
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
