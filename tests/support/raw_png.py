"""PNG files byte by byte, with chunks that no library writes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

Chunk = tuple[bytes, bytes]  # name, body
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6


def png(kind: int, depth: int, rows: Sequence[bytes], *chunks: Chunk, width: int, after: Sequence[Chunk] = ()) -> bytes:
    """A file of `depth` bits a channel; `rows` are the packed samples, `chunks` stand before them, `after` behind."""
    header = struct.pack(">IIBBBBB", width, len(rows), depth, kind, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in ((b"IHDR", header), *chunks, (b"IDAT", data), *after, (b"IEND", b"")))
