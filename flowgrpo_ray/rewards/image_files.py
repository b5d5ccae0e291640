"""Images from outside as arrays: 8-bit RGB, and an error for what would be read as something else than people see.

Imports only the standard library and numpy; Pillow when it is used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_GREYS = {"L;2": 85, "L;4": 17}  # what Pillow multiplies grey samples of 2 and 4 bits by, but not the one that is transparent


class ImageError(ValueError):
    """No image, or one that would be read wrongly. The message goes on after the image's name."""


def read_rgb(source: Path | BinaryIO) -> np.ndarray:
    """uint8 [H, W, 3], RGB, of a file in any format that Pillow knows.

    Raises:
        ImageError: it cannot be read, and as `rgb_of`.
    """
    from PIL import Image

    try:
        with Image.open(source) as image:
            return rgb_of(image)
    except ImageError:
        raise
    except Exception as error:  # damaged bytes lead Pillow's decoders to errors of every type
        raise ImageError(f"cannot be read as an image: {error}") from error


def rgb_of(image: Any) -> np.ndarray:
    """uint8 [H, W, 3], RGB, of a file that `PIL.Image.open` has opened and that is not decoded yet. Pillow's errors pass
    through.

    Raises:
        ImageError: more than 8 bits a channel, or transparent in places (the colour there is one that nobody sees).
    """
    layout = str(image.tile[0][3]) if image.tile else image.mode  # of the samples in the file: 16-bit RGB is "RGB;16B"
    if image.mode.startswith(("I", "F")) or re.search(";16[BLN]", layout):
        raise ImageError(f"has more than 8 bits a channel ({layout}); convert it to 8 bits first")
    image.load()
    if image.has_transparency_data:  # an alpha channel, or a palette entry or a colour that is declared transparent
        key = image.info.get("transparency")
        if isinstance(key, int) and layout in _GREYS:
            image.info["transparency"] = key * _GREYS[layout]
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema()[0] < 255:
            raise ImageError("is transparent in places; put it on a background first")
    return np.asarray(image.convert("RGB"))
