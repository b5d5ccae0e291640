"""Scores of image files on disk, without Ray: what `flowgrpo-ray score` does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_ray import signals
from flowgrpo_ray.errors import ConfigError, nearest
from flowgrpo_ray.prompts import PromptRecord
from flowgrpo_ray.rewards import Reward
from flowgrpo_ray.rewards.base import no_exit, renamed, validated

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TABLE_ENDINGS = (".parquet", ".csv", ".jsonl")
_NUMBERED = re.compile(r"(\d+)_(\d+)")  # <prompt>_<image>, as `flowgrpo-ray sample` writes them


@dataclass
class Picture:
    """An image file, the prompt that it belongs to (its number in the prompt file), and its scores by key."""

    path: Path
    number: int
    record: PromptRecord
    scores: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def find_pictures(folder: str | Path, records: Sequence[PromptRecord]) -> list[Picture]:
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
        raise ConfigError(f"{folder} holds no images ({', '.join(IMAGE_ENDINGS)})")
    numbered = [(int(match[1]), path) for path in files if (match := _NUMBERED.fullmatch(path.stem))]
    if len(numbered) == len(files) - sum(path.stem == "grid" for path in files) and numbered:
        beyond = [path.name for number, path in numbered if number >= len(records)]
        if beyond and len(records) > 1:
            raise ConfigError(f"{beyond[0]} is named after prompt {int(beyond[0].split('_')[0])} (counted from 0), and there "
                              f"are {len(records)} prompts")
        return [Picture(path, number, records[number if len(records) > 1 else 0]) for number, path in numbered]
    if len(records) == 1:
        return [Picture(path, 0, records[0]) for path in files]
    if len(files) != len(records):
        raise ConfigError(f"{folder} holds {len(files)} images, and there are {len(records)} prompts; give a prompt per image "
                          "in the order of the file names, a single prompt, or names such as 03_01.png (prompt 3, image 1)")
    return [Picture(path, number, record) for number, (path, record) in enumerate(zip(files, records, strict=True))]


def read_image(path: Path) -> np.ndarray:
    """uint8 [H, W, 3], RGB. Raises ConfigError where the file is no image."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise ConfigError(f"{path} has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits first")
            if "A" in image.getbands() and image.getchannel("A").getextrema()[0] < 255:
                raise ConfigError(f"{path} is transparent in places; put it on a background first")
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path} cannot be read as an image: {error}") from error


def score_pictures(reward: Reward, name: str, pictures: Sequence[Picture]) -> None:
    """Score pictures in place; the keys of their scores carry `name`.

    Pictures of equal size are scored `reward.batch_size` at a time (those of one prompt together, where the reward scores
    whole groups). A batch that fails is scored again one by one; a picture that fails then has no score, and its `error` says
    why, after what it says of other rewards.
    """
    size = int(reward.settings.get("batch_size") or reward.batch_size)
    whole = reward.scope == "group"
    batches: dict[Any, list[tuple[Picture, np.ndarray]]] = {}
    for picture in pictures:
        image = read_image(picture.path)
        batches.setdefault((picture.number if whole else None, image.shape), []).append((picture, image))
    for rows in batches.values():
        step = len(rows) if whole else size
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            signals.check()
            try:
                _score(reward, name, part)
            except ConfigError:
                raise
            except Exception as error:
                if whole or len(part) == 1:
                    _fail(name, part, error)
                    continue
                for row in part:
                    try:
                        _score(reward, name, [row])
                    except Exception as error:
                        _fail(name, [row], error)


def _score(reward: Reward, name: str, rows: Sequence[tuple[Picture, np.ndarray]]) -> None:
    with no_exit(name):
        result = reward.score(np.stack([image for _, image in rows]), [p.record.prompt for p, _ in rows],
                              [p.record.reward_metadata for p, _ in rows],
                              group_ids=[p.number for p, _ in rows] if reward.scope == "group" else None)
    for key, values in renamed(validated(result, len(rows), reward.name), reward.name, name).items():
        for (picture, _), value in zip(rows, values, strict=True):
            if key in picture.scores:
                raise ConfigError(f"reward {name} gives a score named {key!r}, which another reward has given; score with one "
                                  "of them at a time")
            picture.scores[key] = float(value)


def _fail(name: str, rows: Sequence[tuple[Picture, np.ndarray]], error: Exception) -> None:
    for picture, _ in rows:
        before = f"{picture.error}; " if picture.error else ""
        picture.error = f"{before}{name}: {type(error).__name__}: {error}"


def write_table(path: str | Path, pictures: Sequence[Picture], keys: Sequence[str]) -> None:
    """Write path, prompt, scores (null where there is none) and error of every picture as .parquet, .csv or .jsonl.

    Raises:
        ConfigError: the ending is another.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    path = check_table(path)
    columns: dict[str, Any] = {"path": [str(p.path) for p in pictures], "prompt": [p.record.prompt for p in pictures]}
    columns |= {key: pa.array([p.scores.get(key) for p in pictures], pa.float64()) for key in keys}
    columns["error"] = pa.array([p.error for p in pictures], pa.string())
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
