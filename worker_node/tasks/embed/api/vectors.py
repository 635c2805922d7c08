"""Rendering many numbers as JSON without holding up the event loop."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import orjson

# Rendering this many numbers as JSON takes about a millisecond; between chunks other requests get their turn.
_NUMBERS_PER_CHUNK = 32_768


async def rows_json(vectors: npt.NDArray[np.float32]) -> AsyncIterator[bytes]:
    """Yield the inside of a JSON list of the rows of `vectors` (n, d)."""
    async for start, rows in _chunks(vectors):
        yield b"," * bool(start) + orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


async def embedding_objects(vectors: npt.NDArray[np.float32], *, as_base64: bool) -> AsyncIterator[bytes]:
    """Yield the inside of OpenAI's list of embedding objects; base64 is that of little-endian float32."""
    async for start, rows in _chunks(vectors):
        items = [
            {
                "object": "embedding",
                "index": start + offset,
                "embedding": base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode() if as_base64 else row,
            }
            for offset, row in enumerate(rows)
        ]
        yield b"," * bool(start) + orjson.dumps(items, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


async def _chunks(vectors: npt.NDArray[np.float32]) -> AsyncIterator[tuple[int, npt.NDArray[np.float32]]]:
    count, dimensions = vectors.shape
    step = max(1, _NUMBERS_PER_CHUNK // max(1, dimensions))
    for start in range(0, count, step):
        if start:
            await asyncio.sleep(0)
        yield start, vectors[start : start + step]
