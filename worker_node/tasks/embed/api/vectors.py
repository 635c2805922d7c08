"""Rendering many numbers as JSON without holding up the event loop."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import orjson

# Rendering this many numbers as JSON takes about a millisecond; between chunks other requests get their turn.
_NUMBERS_PER_CHUNK = 32_768


async def rows_json(vectors: npt.NDArray[np.float32]) -> bytes:
    """Return the inside of a JSON list of the rows of `vectors` (n, d)."""

    def render(_start: int, rows: npt.NDArray[np.float32]) -> bytes:
        return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]

    return await _in_chunks(vectors, render)


async def embedding_objects(vectors: npt.NDArray[np.float32], *, as_base64: bool) -> bytes:
    """Return the inside of OpenAI's list of embedding objects; base64 is that of little-endian float32."""

    def render(start: int, rows: npt.NDArray[np.float32]) -> bytes:
        items = [
            {
                "object": "embedding",
                "index": start + offset,
                "embedding": base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode() if as_base64 else row,
            }
            for offset, row in enumerate(rows)
        ]
        return orjson.dumps(items, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]

    return await _in_chunks(vectors, render)


async def _in_chunks(
    vectors: npt.NDArray[np.float32], render: Callable[[int, npt.NDArray[np.float32]], bytes]
) -> bytes:
    """What `render` makes of the rows, given with the number of the first of them, joined by commas."""
    count, dimensions = vectors.shape
    step = max(1, _NUMBERS_PER_CHUNK // max(1, dimensions))
    parts = []
    for start in range(0, count, step):
        if start:
            await asyncio.sleep(0)
        parts.append(render(start, vectors[start : start + step]))
    return b",".join(parts)
