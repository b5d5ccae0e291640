"""HTML pages that are one file without references to anything else.

Prompts, names and configuration are untrusted text: the templates escape everything.
"""

from __future__ import annotations

import base64
import io
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True)
    environment.filters |= {"number": number, "signed": signed}
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(written=written, **values)


def number(value: float) -> str:
    """Four significant digits, and thousands apart."""
    if math.isfinite(value) and (abs(value) >= 1e4 or value == int(value)) and abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def signed(value: float) -> str:
    return ("+" if value >= 0 else "−") + number(abs(value))


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def inline(png: bytes, largest: int) -> str:
    """A data URI; images wider than `largest` pixels are scaled down and stored as JPEG to keep the page small."""
    image = Image.open(io.BytesIO(png))
    kind, data = "png", png
    if image.width > largest:
        size = (largest, max(1, round(image.height * largest / image.width)))
        sink = io.BytesIO()
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(sink, "JPEG", quality=88)
        kind, data = "jpeg", sink.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
