"""Boxes of text in the order in which a person reads them; the real engine reads what Pillow draws."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards.reading_order import reading_order


def box(x: float, y: float, width: float, height: float, degrees: float = 0.0) -> np.ndarray:
    """A box by its upper left corner, turned about the origin."""
    corners = np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]])
    a = np.radians(degrees)
    return corners @ np.array([[np.cos(a), np.sin(a)], [-np.sin(a), np.cos(a)]])


LINES = [  # boxes in reading order, and what they show
    ([box(0, 18, 200, 60), box(220, 0, 200, 60)], "18 px lower at 60 px letters is the same line"),
    ([box(0, 0, 200, 60), box(220, 18, 200, 60)], "18 px higher as well"),
    ([box(0, 0, 40, 10), box(0, 9, 40, 10)], "two lines of small letters, 9 px apart"),
    ([box(100, 0, 80, 20), box(0, 14, 80, 20)], "a line that begins further left, lower by 0.7 letters"),
    ([box(0, 0, 200, 60), box(0, 55, 200, 60), box(210, 57, 200, 60)], "two lines that touch"),
    ([box(0, 0, 100, 100), box(110, 30, 60, 40), box(180, 35, 20, 20)], "letters of other sizes beside a large one"),
    ([box(0, 0, 100, 100), box(110, 0, 100, 40), box(110, 60, 100, 40)], "two lines beside an initial"),
    ([box(0, 30 * i, 80, 20) for i in range(5)], "a column"),
    ([box(x, y, 80, 20) for y in (0, 25) for x in (0, 200)], "two columns are read across"),
    ([box(60 * i, 12 * i, 50, 30) for i in range(6)], "a line that sinks bit by bit"),
    ([box(60 * i, -12 * i, 50, 30) for i in range(6)], "one that rises"),
]
SHORT = [([box(0, 0, 10, 40), box(20, 0, 30, 40), box(60, 0, 10, 40)], "single letters"), ([], "nothing"),
         ([box(0, 0, 10, 10)], "one")]


@pytest.mark.parametrize(("boxes", "why", "degrees"), [
    *((boxes, why, degrees) for boxes, why in LINES for degrees in (0, -20, 20)),
    *((boxes, why, 0) for boxes, why in SHORT)])
def test_order_of_boxes(boxes, why, degrees):
    """However the boxes come, and turned as a whole, the order is the same."""
    boxes = [box(*b[0], *(b[2] - b[0]), degrees) for b in boxes]
    rng = np.random.default_rng(0)
    for _ in range(5):
        shuffled = rng.permutation(len(boxes))
        order = reading_order([boxes[i] for i in shuffled])
        assert [int(shuffled[i]) for i in order] == list(range(len(boxes))), why


@pytest.fixture(scope="module")
def reader():
    return rewards.get("ocr")


@pytest.mark.parametrize(("words", "degrees"), [
    ([("HELLO", 40, 118), ("WORLD", 300, 100)], 0),  # shifted
    ([("HELLO", 40, 100), ("WORLD", 300, 118)], 0),
    ([("OPEN", 60, 60), ("DOOR", 300, 60), ("FISH", 60, 150), ("MILK", 300, 150)], 0),  # two lines
    ([("OPEN", 60, 70), ("DOOR", 300, 70), ("FISH", 60, 160), ("MILK", 300, 160)], 12),  # tilted
    ([("OPEN", 60, 70), ("DOOR", 300, 70), ("FISH", 60, 160), ("MILK", 300, 160)], -12),
    ([("CAFE", 300, 40), ("EXIT", 60, 110)], 0),  # the second line begins further left
])
def test_text_is_read_in_order(reader, words, degrees):
    image = Image.new("RGB", (560, 280), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(60)
    for word, x, y in words:
        draw.text((x, y), word, "black", font, anchor="lm")
    image = image.rotate(degrees, Image.Resampling.BICUBIC, expand=True, fillcolor="white")
    text = "".join(word for word, _, _ in words)
    pixels = np.asarray(image)[None]
    assert reader.score(pixels, [f'"{text}"'], [{}])["ocr_exact"].tolist() == [1.0], reader.read(pixels)
