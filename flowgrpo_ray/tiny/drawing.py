"""Images of words, drawn with the font that Pillow carries: the tiny model's whole training data.

Every image is a uint8 array [HEIGHT, WIDTH, 3], grey on grey, and depends on its arguments and the generator alone.
"""

from __future__ import annotations

import string
from functools import lru_cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flowgrpo_ray.tiny import IMAGE_SIZE

HEIGHT, WIDTH = IMAGE_SIZE
# Four latent pixels of the VAE, two patches of the transformer: letter i always falls on the same tokens. With cells
# that straddle the patches a transformer of this size does not learn the letters.
CELL = 16
LONGEST = WIDTH // CELL
_PAPER, _INK, _FONT_SIZE = 245, 20, 20


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def prompt_of(word: str) -> str:
    """The caption of an image; OCR rewards take the quoted part as their target."""
    return f'the word "{word}"'


def random_word(rng: Random) -> str:
    """Two to four random capitals."""
    return "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(2, LONGEST)))


def neat(word: str, rng: Random) -> np.ndarray:
    """The word from the left edge, each letter centred in a cell of its own, the line at most 1 px up or down."""
    font = _font(_FONT_SIZE)
    page = Image.new("L", (WIDTH, HEIGHT), _PAPER)
    pen = ImageDraw.Draw(page)
    _, top, _, bottom = font.getbbox("H")
    y = (HEIGHT - (bottom - top)) / 2 - top + rng.randint(-1, 1)
    for i, letter in enumerate(word):
        left, _, right, _ = font.getbbox(letter)
        pen.text((round(i * CELL + (CELL - (right - left)) / 2 - left), y), letter, font=font, fill=_INK)
    return _rgb(page)


def scribbled(word: str, rng: Random) -> np.ndarray:
    """The word under one or two zigzag lines. (A straight line through it would not stop an OCR model from reading.)"""
    page = Image.fromarray(neat(word, rng)[..., 0])
    pen = ImageDraw.Draw(page)
    for _ in range(rng.randint(1, 2)):
        corners, upper = 2 * rng.randint(3, 5), rng.random() < 0.5
        line = []
        for i in range(corners + 1):
            y = rng.randint(6, 11) if (i % 2 == 0) == upper else rng.randint(20, 26)
            line.append((i * len(word) * CELL / corners, y))
        pen.line(line, fill=_INK, width=2)
    return _rgb(page)


def misspelt(word: str, rng: Random) -> np.ndarray:
    """The word, neatly, with half of its letters (at least one) replaced by random ones."""
    letters = list(word)
    for i in rng.sample(range(len(word)), max(1, len(word) // 2)):
        letters[i] = rng.choice(string.ascii_uppercase)
    return neat("".join(letters), rng)


def careless(word: str, rng: Random, p_scribbled: float, p_misspelt: float) -> np.ndarray:
    """What the careless writer learns from: scribbled over, misspelt, or neat, and the caption never says which."""
    u = rng.random()
    if u < p_scribbled:
        return scribbled(word, rng)
    if u < p_scribbled + p_misspelt:
        return misspelt(word, rng)
    return neat(word, rng)


def practice_page(word: str, rng: Random) -> np.ndarray:
    """The word in a random size, place and contrast: training data of the VAE, wider than what it encodes later."""
    size = rng.randint(20, 24)
    left, _, right, _ = _font(size).getbbox(word)
    while right - left > WIDTH - 6:
        size -= 1
        left, _, right, _ = _font(size).getbbox(word)
    _, top, _, bottom = _font(size).getbbox("H")
    x = (WIDTH - (right - left)) / 2 - left + rng.randint(-2, 2)
    y = (HEIGHT - (bottom - top)) / 2 - top + rng.randint(-2, 2)
    page = Image.new("L", (WIDTH, HEIGHT), rng.randint(215, 255))
    ImageDraw.Draw(page).text((x, y), word, font=_font(size), fill=rng.randint(0, 60))
    return _rgb(page)


def _rgb(page: Image.Image) -> np.ndarray:
    return np.repeat(np.asarray(page)[:, :, None], 3, axis=2)
