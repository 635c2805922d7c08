"""The icon in a browser's tab: a chip, drawn here so that no binary file is kept."""

from __future__ import annotations

import struct
import zlib

_SIZE = 16
_INK, _CLEAR = b"\x0b\x62\xb0\xff", b"\x00\x00\x00\x00"


def _is_ink(x: int, y: int) -> bool:
    """A square with a hole, and three pins on each side."""
    inside = 3 <= x <= 12 and 3 <= y <= 12
    hole = 6 <= x <= 9 and 6 <= y <= 9
    pins = (x in {4, 7, 10} and y not in {0, 15}) or (y in {4, 7, 10} and x not in {0, 15})
    return (inside and not hole) or (not inside and pins)


def _png() -> bytes:
    rows = b"".join(b"\0" + b"".join(_INK if _is_ink(x, y) else _CLEAR for x in range(_SIZE)) for y in range(_SIZE))
    head = struct.pack(">IIBBBBB", _SIZE, _SIZE, 8, 6, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _ico(png: bytes) -> bytes:
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", _SIZE, _SIZE, 0, 0, 1, 32, len(png), 22) + png


ICON = _ico(_png())
