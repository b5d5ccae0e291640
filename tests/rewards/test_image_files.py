import io
import itertools

import numpy as np
import pytest
from PIL import Image
from raw_png import GREY, GREY_ALPHA, PALETTE, RGB, RGBA, png

from flowgrpo_ray.rewards.image_files import ImageError, read_rgb

IMAGE = np.random.default_rng(0).integers(1, 256, (6, 8, 3), np.uint8)
COLOURS = (b"PLTE", bytes([255, 0, 0, 0, 0, 255]))


def saved(image, form, **more):
    buffer = io.BytesIO()
    image.save(buffer, form, **more)
    return buffer.getvalue()


def with_alpha(value):
    return Image.fromarray(np.concatenate([IMAGE, np.full((6, 8, 1), value, np.uint8)], axis=2))


@pytest.mark.parametrize("data", [
    saved(Image.fromarray(IMAGE), "PNG"), saved(with_alpha(255), "PNG"), saved(Image.fromarray(IMAGE), "BMP"),
    saved(with_alpha(255), "WEBP", lossless=True), saved(Image.fromarray(IMAGE), "PNG", transparency=(0, 0, 0)),
], ids=itertools.count())
def test_pixels_are_those_of_the_file(data, tmp_path):
    (tmp_path / "a.png").write_bytes(data)
    for source in (io.BytesIO(data), tmp_path / "a.png"):
        found = read_rgb(source)
        assert found.dtype == np.uint8 and np.array_equal(found, IMAGE)


@pytest.mark.parametrize(("data", "pixels"), [
    (png(PALETTE, 1, [b"\x40"], COLOURS, width=2), [[255, 0, 0], [0, 0, 255]]),
    (png(PALETTE, 1, [b"\x40"], COLOURS, (b"tRNS", b"\xff\xff"), width=2), [[255, 0, 0], [0, 0, 255]]),
    (png(PALETTE, 1, [b"\x40"], (COLOURS[0], COLOURS[1] + b"\0\xff\0"), (b"tRNS", b"\xff\xff\0"), width=2),
     [[255, 0, 0], [0, 0, 255]]),  # no pixel has the transparent entry
    (png(GREY, 4, [b"\x0f"], (b"tRNS", b"\0\x07"), width=2), [[0] * 3, [255] * 3]),
    (png(GREY, 2, [b"\x10"], (b"tRNS", b"\0\x03"), width=2), [[0] * 3, [85] * 3]),
    (png(GREY, 1, [b"\x00"], (b"tRNS", b"\0\x01"), width=2), [[0] * 3] * 2),
    (png(GREY, 8, [b"\x00\x09"], (b"tRNS", b"\0\x08"), width=2), [[0] * 3, [9] * 3]),
], ids=itertools.count())
def test_what_is_declared_transparent_and_nowhere_to_be_seen_is_no_fault(data, pixels):
    assert read_rgb(io.BytesIO(data)).tolist() == [pixels]


@pytest.mark.parametrize("data", [
    saved(with_alpha(254), "PNG"), saved(with_alpha(0), "WEBP", lossless=True),
    saved(Image.fromarray(IMAGE), "PNG", transparency=tuple(map(int, IMAGE[3, 3]))),
    png(PALETTE, 1, [b"\x40"], COLOURS, (b"tRNS", b"\0"), width=2),
    png(PALETTE, 1, [b"\x40"], COLOURS, (b"tRNS", b"\xff\xfe"), width=2),
    png(GREY, 8, [b"\x00\x09"], (b"tRNS", b"\0\x09"), width=2),
    png(GREY, 4, [b"\x0f"], (b"tRNS", b"\0\x0f"), width=2),
    png(GREY, 4, [b"\x07"], (b"tRNS", b"\0\x07"), width=2),
    png(GREY, 2, [b"\x10"], (b"tRNS", b"\0\x01"), width=2),
    png(GREY, 1, [b"\x40"], (b"tRNS", b"\0\x01"), width=2),
    png(GREY_ALPHA, 8, [b"\x09\xff\x09\x00"], width=2),
], ids=itertools.count())
def test_hidden_colours_are_refused(data):
    with pytest.raises(ImageError, match="^is transparent in places; put it on a background first"):
        read_rgb(io.BytesIO(data))


@pytest.mark.parametrize("data", [
    saved(Image.fromarray(np.arange(4, dtype=np.uint16).reshape(2, 2)), "PNG"),
    saved(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"),
    png(GREY, 16, [b"\xff\x01" * 2], width=2), png(GREY_ALPHA, 16, [b"\xff\x01\xff\xff" * 2], width=2),
    png(RGB, 16, [b"\xff\x01" * 6], width=2), png(RGBA, 16, [b"\xff\x01" * 6 + b"\xff" * 4], width=2),
], ids=itertools.count())
def test_more_than_eight_bits_are_refused(data):
    with pytest.raises(ImageError, match=r"^has more than 8 bits a channel \(.*\); convert it to 8 bits first"):
        read_rgb(io.BytesIO(data))


ROW = [b"\x09\x08\x07"]


@pytest.mark.parametrize("data", [
    b"", b"no image", saved(Image.fromarray(IMAGE), "PNG")[:-30], saved(Image.fromarray(IMAGE), "JPEG")[:-200],
    png(RGB, 8, ROW, (b"pHYs", b"\0"), width=1),  # Pillow: ValueError
    png(RGB, 8, ROW, (b"sRGB", b""), width=1),  # ValueError
    png(RGB, 8, ROW, width=1, after=[(b"iCCP", b"a\0")]),  # IndexError
    png(RGB, 8, ROW, (b"!!!!", b""), width=1),  # SyntaxError
], ids=itertools.count())
def test_what_cannot_be_read_is_one_error(data):
    with pytest.raises(ImageError, match="^cannot be read as an image: "):
        read_rgb(io.BytesIO(data))


def test_more_pixels_than_pillow_takes(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(ImageError, match="cannot be read as an image: .*48 pixels"):
        read_rgb(io.BytesIO(saved(Image.fromarray(IMAGE), "PNG")))


def test_no_file():
    with pytest.raises(ImageError, match="cannot be read as an image: .*No such file"):
        read_rgb("/no/such/image.png")
