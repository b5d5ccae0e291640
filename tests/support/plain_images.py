"""Images of one colour, as PNG."""

import io

from PIL import Image


def png(color, size=(8, 8)):
    sink = io.BytesIO()
    Image.new("RGB", size, color).save(sink, "PNG")
    return sink.getvalue()
