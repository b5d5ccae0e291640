"""Every sample of a run with its scores (Parquet), and grids of images at fixed seeds (PNG), under `samples/`."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngImageFile, PngInfo

from flowgrpo_ray import storage
from flowgrpo_ray.errors import FlowGrpoError, counted

_CAPTIONED_WIDTH = 120  # pixels that the widest captioned image has at least
_GAP, _LINE = 4, 14  # pixels between the images of a grid, and of a caption's line
_SCORE_LINES = 3  # of a caption
_CHUNK = "flowgrpo"  # PNG text chunk with what is known of the images
_PROMPT_KEPT = 1000  # characters of a prompt in it: 64 prompts stay below what PIL reads back
_GRID_NAME = re.compile(r"(.+)_step_(\d+)\.png")


def _parts(run_dir: str) -> storage.PartFiles:
    return storage.PartFiles(storage.join(run_dir, "samples"), ".parquet")


class SampleWriter:
    """Appends samples to `samples/part-<first step>-<last step>.parquet`, a row per sample.

    Columns: step, group, sample (int64), prompt (string), seed (int64: seeds the generator of the sample's initial
    latent), `reward:<name>` (float64; null where there is no score), total (float64: weighted sum of the optimised scores;
    null for masked samples), valid (bool), advantage (float64). `step` = committed training steps after it, as in the
    metrics. `before_write` is called before each part is written, as by `MetricsWriter`.
    """

    def __init__(
        self, run_dir: str, flush_every: int = 10, before_write: Callable[[], None] = lambda: None
    ):
        self.run_dir, self.flush_every, self._before_write = run_dir, flush_every, before_write
        self._parts = _parts(run_dir)
        self._pending: list[pa.Table] = []
        self._steps: list[int] = []
        self._last = self._parts.last_step()

    def append_group(
        self, step: int, group: int, prompt: str, *, rewards: Mapping[str, np.ndarray], valid: np.ndarray,
        advantages: np.ndarray, total: np.ndarray, seeds: Sequence[int],
    ) -> None:
        """Take one group: arrays [k] of float64 scores by name (NaN = no score), bool, float64, float64 (NaN = no score)
        and int.

        Raises:
            FlowGrpoError: the step lies before what was taken already (see `truncate`), or the lengths differ.
        """
        if step <= self._last or (self._steps and step < self._steps[-1]):
            last = max([self._last, *self._steps])
            raise FlowGrpoError(f"samples: a group of step {step} after those of step {last}")
        k = len(valid)
        odd = [name for name, values in {**rewards, "advantages": advantages, "total": total, "seeds": seeds}.items()
               if len(values) != k]
        if odd:
            raise FlowGrpoError(f"samples: group {group} of step {step} has {counted(k, 'sample')}, "
                                f"but {odd} have another length")
        if self._steps and step > self._steps[-1] and len(set(self._steps)) >= self.flush_every:
            self.flush()
        columns = {
            "step": pa.array([step] * k, pa.int64()), "group": pa.array([group] * k, pa.int64()),
            "sample": pa.array(range(k), pa.int64()), "prompt": pa.array([prompt] * k, pa.string()),
            "seed": pa.array(seeds, pa.int64()),
            **{f"reward:{name}": pa.array(np.asarray(rewards[name], np.float64), from_pandas=True)  # NaN to null
               for name in sorted(rewards)},
            "total": pa.array(np.asarray(total, np.float64), from_pandas=True),
            "valid": pa.array(np.asarray(valid, bool)), "advantage": pa.array(np.asarray(advantages, np.float64))}
        self._pending.append(pa.table(columns))
        self._steps.append(step)

    def flush(self) -> None:
        """Write what is pending. Call it between steps: a step lies in one part."""
        if self._pending:
            self._before_write()
            self._parts.write(self._steps[0], self._steps[-1], _to_parquet(_concat(self._pending)))
            self._last = self._steps[-1]
            self._pending, self._steps = [], []

    def truncate(self, after_step: int) -> None:
        """Cut off all samples and grids beyond `after_step` (-1 = all)."""

        def cut(data: bytes, uri: str) -> tuple[int, bytes]:
            table = _from_parquet(data, uri)
            table = table.filter(pc.less_equal(table["step"], after_step))
            return pc.max(table["step"]).as_py(), _to_parquet(table)

        self._parts.truncate(after_step, cut)
        keep = [i for i, step in enumerate(self._steps) if step <= after_step]
        self._pending, self._steps = [self._pending[i] for i in keep], [self._steps[i] for i in keep]
        self._last = self._parts.last_step()
        for _, step, uri in list_grids(self.run_dir):
            if step > after_step:
                storage.delete_file(uri)


def read_samples(run_dir: str, ends_only: bool = False) -> pa.Table | None:
    """All samples on file in step order (or those of the first and the newest part); None where there are none."""
    tables, seen, parts = [], -1, _parts(run_dir).list()
    for first, last, uri in parts[:1] + parts[1:][-1:] if ends_only else parts:
        table = _from_parquet(storage.read_bytes(uri), uri)
        if first <= seen:  # a truncation that was cut short leaves the same rows in two parts
            table = table.filter(pc.greater(table["step"], seen))
        tables.append(table)
        seen = max(seen, last)
    return _concat(tables) if tables else None


def _concat(tables: Sequence[pa.Table]) -> pa.Table:
    """One table; a score that a part lacks (its reward was added later, or never answered) is null there."""
    table = pa.concat_tables(tables, promote_options="default")
    scores = sorted(name for name in table.column_names if name.startswith("reward:"))
    total = ["total"] if "total" in table.column_names else []  # runs of older versions have none
    return table.select(["step", "group", "sample", "prompt", "seed", *scores, *total, "valid", "advantage"])


def _to_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _from_parquet(data: bytes, uri: str) -> pa.Table:
    try:
        return pq.read_table(io.BytesIO(data))
    except (pa.ArrowInvalid, OSError) as error:
        raise FlowGrpoError(f"{storage.display(uri)} is damaged: {error}") from None


@dataclass(frozen=True)
class GridImage:
    """One image of a grid, and what is known of it.

    `png` holds the pixels; `seed` seeds the generator of its initial latent, so two images of one prompt, size and seed
    begin at the same noise; `scores` has the scores that exist.
    """

    png: bytes
    prompt: str = ""
    seed: int | None = None
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int | None]:
        """Equal for images of one prompt and one initial noise."""
        return self.prompt, self.seed


def png_grid(items: Sequence[GridImage], columns: int = 6) -> bytes:
    """One PNG out of many images, row by row; cells have the size of the largest image, captions stand under the images.

    A caption is the prompt and the scores; where there are captions, small images are enlarged (whole pixels, no smoothing)
    so that they have room. Prompts, seeds and scores also go into the file as a text chunk, which `read_grid` reads.

    Raises:
        FlowGrpoError: there are no images.
    """
    if not items:
        raise FlowGrpoError("a grid needs at least one image")
    images = [Image.open(io.BytesIO(item.png)).convert("RGB") for item in items]
    columns, scale, font = min(columns, len(images)), 1, ImageFont.load_default(11)
    if any(item.prompt or item.scores for item in items):
        scale = math.ceil(_CAPTIONED_WIDTH / max(image.width for image in images))
    images = [image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST) for image in images]
    width, height = max(i.width for i in images), max(i.height for i in images)
    captions = [_caption(item, font, width) for item in items]
    lines = max(map(len, captions))
    cell = height + (_LINE * lines + 2 if lines else 0)
    size = columns * (width + _GAP) + _GAP, math.ceil(len(images) / columns) * (cell + _GAP) + _GAP
    grid = Image.new("RGB", size, "white")
    draw, boxes = ImageDraw.Draw(grid), []
    for i, image in enumerate(images):
        x, y = _GAP + i % columns * (width + _GAP), _GAP + i // columns * (cell + _GAP)
        place = x + (width - image.width) // 2, y + (height - image.height) // 2
        grid.paste(image, place)
        boxes.append([*place, image.width, image.height])
        for number, text in enumerate(captions[i]):
            draw.text((x, y + height + 1 + number * _LINE), text, fill="black" if number == 0 else "#475569", font=font)
    facts = [{"box": box, "prompt": item.prompt[:_PROMPT_KEPT], "seed": item.seed, "scores": item.scores}
             for box, item in zip(boxes, items, strict=True)]
    info, sink = PngInfo(), io.BytesIO()
    info.add_text(_CHUNK, json.dumps({"scale": scale, "images": facts}), zip=True)
    grid.save(sink, "PNG", pnginfo=info)
    return sink.getvalue()


def read_grid(png: bytes) -> list[GridImage]:
    """The images of a grid as they went into `png_grid`, pixel by pixel; empty for a PNG without that text chunk."""
    grid = Image.open(io.BytesIO(png))
    text = grid.text.get(_CHUNK) if isinstance(grid, PngImageFile) else None
    if text is None:
        return []
    facts, out = json.loads(text), []
    for fact in facts["images"]:
        x, y, width, height = fact["box"]
        image = grid.crop((x, y, x + width, y + height))
        small = image.resize((width // facts["scale"], height // facts["scale"]), Image.Resampling.NEAREST)
        sink = io.BytesIO()
        small.save(sink, "PNG")
        out.append(GridImage(sink.getvalue(), fact["prompt"], fact["seed"], fact["scores"]))
    return out


def _caption(item: GridImage, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """The prompt in one line, then the scores in as many as they take, up to three."""
    lines = [_fit(item.prompt, font, width)] if item.prompt or item.scores else []
    for text in (f"{name} {value:.3g}" for name, value in item.scores.items()):
        if len(lines) > 1 and font.getlength(joined := f"{lines[-1]}  {text}") <= width:
            lines[-1] = joined
        elif len(lines) < 1 + _SCORE_LINES:
            lines.append(_fit(text, font, width))
    return lines


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    text = " ".join(text[:500].split())
    if font.getlength(text) <= width:
        return text
    # Prompts differ at either end, so the middle goes.
    keep = len(text) - 1
    while keep > 0 and font.getlength(short := f"{text[: keep // 2]}…{text[len(text) - (keep - keep // 2) :]}") > width:
        keep -= 1
    return short if keep > 0 else "…"


def write_grid(run_dir: str, weights: str, step: int, png: bytes) -> str:
    """Write a grid (see `png_grid`) as `samples/grids/<weights>_step_<step>.png` and return its URI."""
    return storage.write_bytes(storage.join(run_dir, "samples", "grids", f"{weights}_step_{step:06d}.png"), png)


def list_grids(run_dir: str) -> list[tuple[str, int, str]]:
    """(weights, step, URI) of every grid, by step."""
    folder = storage.join(run_dir, "samples", "grids")
    matches = [_GRID_NAME.fullmatch(name) for name in storage.list_dir(folder)]
    return sorted(((m[1], int(m[2]), storage.join(folder, m[0])) for m in matches if m), key=lambda g: (g[1], g[0]))
