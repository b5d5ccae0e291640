import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory):
    """Model folders are made in a temporary cache, never in the home folder of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def draw_word():
    """Function: a word of up to 4 capitals -> uint8 [32, 64, 3], each letter in a cell of 16 px, dark on light."""
    font = ImageFont.load_default(20)
    _, top, _, bottom = font.getbbox("H")

    def draw(word, ink=(20, 20, 20), paper=(245, 245, 245)):
        image = Image.new("RGB", (64, 32), paper)
        pen = ImageDraw.Draw(image)
        for cell, letter in enumerate(word):
            left, _, right, _ = font.getbbox(letter)
            pen.text((round(cell * 16 + (16 - (right - left)) / 2 - left), (32 - (bottom - top)) / 2 - top), letter,
                     font=font, fill=ink)
        return np.asarray(image)

    return draw


@pytest.fixture(scope="session")
def draw_page():
    """Function: lines of text -> uint8 [256, 256, 3], each line somewhere in the middle of a coloured page."""

    def draw(*lines, ink=(90, 0, 40), paper=(180, 220, 235)):
        image = Image.new("RGB", (256, 256), paper)
        pen = ImageDraw.Draw(image)
        for row, line in enumerate(lines):
            pen.text((30, 60 + 60 * row), line, font=ImageFont.load_default(26), fill=ink)
        return np.asarray(image)

    return draw
