"""Every sample of a run with its scores (Parquet), and grids of images at fixed seeds (PNG), under `samples/`."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

from flowgrpo_ray import storage
from flowgrpo_ray.errors import FlowGrpoError

_CAPTIONED_WIDTH = 120  # pixels that the widest captioned image has at least
_GAP, _CAPTION = 4, 16  # pixels between the images of a grid, and of a caption's line
_GRID_NAME = re.compile(r"(.+)_step_(\d+)\.png")


def _parts(run_dir: str) -> storage.PartFiles:
    return storage.PartFiles(storage.join(run_dir, "samples"), ".parquet")


class SampleWriter:
    """Appends samples to `samples/part-<first step>-<last step>.parquet`, a row per sample.

    Columns: step, group, sample (int64), prompt (string), seed (int64, null where the prompt record has none),
    `reward:<name>` (float64; null where there is no score), valid (bool), advantage (float64). `step` = committed
    training steps after it, as in the metrics.
    """

    def __init__(self, run_dir: str, flush_every: int = 10):
        self.run_dir, self.flush_every = run_dir, flush_every
        self._parts = _parts(run_dir)
        self._pending: list[pa.Table] = []
        self._steps: list[int] = []
        self._last = self._parts.last_step()

    def append_group(
        self, step: int, group: int, prompt: str, *, rewards: Mapping[str, np.ndarray], valid: np.ndarray,
        advantages: np.ndarray, seed: int | None = None,
    ) -> None:
        """Take one group: arrays [k] of float64 scores by name (NaN = no score), bool and float64.

        Raises:
            FlowGrpoError: the step lies before what was taken already (see `truncate`), or the lengths differ.
        """
        if step <= self._last or (self._steps and step < self._steps[-1]):
            last = max([self._last, *self._steps])
            raise FlowGrpoError(f"samples: a group of step {step} after those of step {last}")
        k = len(valid)
        odd = [name for name, values in {**rewards, "advantages": advantages}.items() if len(values) != k]
        if odd:
            raise FlowGrpoError(f"samples: group {group} of step {step} has {k} samples, but {odd} have another length")
        if self._steps and step > self._steps[-1] and len(set(self._steps)) >= self.flush_every:
            self.flush()
        columns = {
            "step": pa.array([step] * k, pa.int64()), "group": pa.array([group] * k, pa.int64()),
            "sample": pa.array(range(k), pa.int64()), "prompt": pa.array([prompt] * k, pa.string()),
            "seed": pa.array([seed] * k, pa.int64()),
            **{f"reward:{name}": pa.array(np.asarray(rewards[name], np.float64), from_pandas=True)  # NaN to null
               for name in sorted(rewards)},
            "valid": pa.array(np.asarray(valid, bool)), "advantage": pa.array(np.asarray(advantages, np.float64))}
        self._pending.append(pa.table(columns))
        self._steps.append(step)

    def flush(self) -> None:
        """Write what is pending. Call it between steps: a step lies in one part."""
        if self._pending:
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


def read_samples(run_dir: str, last_part_only: bool = False) -> pa.Table | None:
    """All samples on file in step order (or those of the newest part); None where there are none."""
    tables, seen = [], -1
    for first, last, uri in _parts(run_dir).list()[-1 if last_part_only else 0 :]:
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
    return table.select(["step", "group", "sample", "prompt", "seed", *scores, "valid", "advantage"])


def _to_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _from_parquet(data: bytes, uri: str) -> pa.Table:
    try:
        return pq.read_table(io.BytesIO(data))
    except (pa.ArrowInvalid, OSError) as error:
        raise FlowGrpoError(f"{storage.display(uri)} is damaged: {error}") from None


def png_grid(pngs: Sequence[bytes], columns: int = 6, captions: Sequence[str] | None = None) -> bytes:
    """One PNG out of many, row by row; cells have the size of the largest image, a caption stands under its image.

    Small images are enlarged (whole pixels, no smoothing) where they are captioned, so that a caption has room.

    Raises:
        FlowGrpoError: there are no images, or not as many captions as images.
    """
    if not pngs:
        raise FlowGrpoError("a grid needs at least one image")
    if captions is not None and len(captions) != len(pngs):
        raise FlowGrpoError(f"a grid of {len(pngs)} images got {len(captions)} captions")
    images = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    columns = min(columns, len(images))
    if captions and (scale := math.ceil(_CAPTIONED_WIDTH / max(i.width for i in images))) > 1:
        images = [i.resize((i.width * scale, i.height * scale), Image.Resampling.NEAREST) for i in images]
    width, height = max(i.width for i in images), max(i.height for i in images)
    cell = height + (_CAPTION if captions else 0)
    rows = math.ceil(len(images) / columns)
    grid = Image.new("RGB", (columns * (width + _GAP) + _GAP, rows * (cell + _GAP) + _GAP), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(11)
    for i, image in enumerate(images):
        x, y = _GAP + i % columns * (width + _GAP), _GAP + i // columns * (cell + _GAP)
        grid.paste(image, (x + (width - image.width) // 2, y + (height - image.height) // 2))
        if captions:
            draw.text((x, y + height + 1), _fit(captions[i], font, width), fill="black", font=font)
    sink = io.BytesIO()
    grid.save(sink, "PNG")
    return sink.getvalue()


def _fit(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    text = " ".join(text[:500].split())
    if font.getlength(text) <= width:
        return text
    # Prompts differ at either end, so the middle goes.
    keep = len(text) - 1
    while keep > 0 and font.getlength(short := f"{text[: keep // 2]}…{text[len(text) - (keep - keep // 2) :]}") > width:
        keep -= 1
    return short if keep > 0 else "…"


def write_grid(
    run_dir: str, weights: str, step: int, pngs: Sequence[bytes], captions: Sequence[str] | None = None,
    columns: int = 6,
) -> str:
    """Write `samples/grids/<weights>_step_<step>.png` (see `png_grid`) and return its URI."""
    uri = storage.join(run_dir, "samples", "grids", f"{weights}_step_{step:06d}.png")
    return storage.write_bytes(uri, png_grid(pngs, columns, captions))


def list_grids(run_dir: str) -> list[tuple[str, int, str]]:
    """(weights, step, URI) of every grid, by step."""
    folder = storage.join(run_dir, "samples", "grids")
    matches = [_GRID_NAME.fullmatch(name) for name in storage.list_dir(folder)]
    return sorted(((m[1], int(m[2]), storage.join(folder, m[0])) for m in matches if m), key=lambda g: (g[1], g[0]))
