from itertools import islice
from random import Random

import numpy as np
import pytest

from flowgrpo_ray.tiny import drawing
from flowgrpo_ray.tiny.build_model import read_words, word_source


def careless(word, rng):
    return drawing.careless(word, rng, 0.7, 0.2)


@pytest.mark.parametrize("draw", [drawing.neat, drawing.scribbled, drawing.misspelt, drawing.practice_page, careless])
def test_an_image_depends_on_word_and_generator_alone(draw):
    first = [draw("CAT", Random(seed)) for seed in range(20)]
    again = [draw("CAT", Random(seed)) for seed in range(20)]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(first[0], other) for other in first[1:])
    assert not np.array_equal(first[0], draw("DOG", Random(0)))
    for image in first:
        assert image.shape == (drawing.HEIGHT, drawing.WIDTH, 3) and image.dtype == np.uint8
        assert np.ptp(image) > 100  # there is ink on it


def test_letter_i_stays_in_cell_i():
    whole = drawing.neat("ABCD", Random(0))
    for i in range(drawing.LONGEST):
        cell = slice(i * drawing.CELL, (i + 1) * drawing.CELL)
        other = drawing.neat("ABCD"[:i] + "X" + "ABCD"[i + 1:], Random(0))
        changed = (whole != other).any(axis=(0, 2)).nonzero()[0]
        assert changed.size and cell.start <= changed.min() and changed.max() < cell.stop


def test_careless_shares():
    rng = Random(3)
    only_scribbles = [drawing.careless("CAT", rng, 1.0, 0.0) for _ in range(20)]
    neat = [drawing.neat("CAT", Random(seed)) for seed in range(20)]
    assert all(not any(np.array_equal(a, b) for b in neat) for a in only_scribbles)
    only_neat = [drawing.careless("CAT", rng, 0.0, 0.0) for _ in range(20)]
    assert all(any(np.array_equal(a, b) for b in neat) for a in only_neat)


def test_training_words_are_never_held_out():
    words = list(islice(word_source(Random(0)), 20_000))
    assert not set(words) & set(read_words("heldout_long.txt"))
    assert set(read_words("train.txt")) <= set(words)
    assert words == list(islice(word_source(Random(0)), 20_000))
