"""The vectors of recent texts, so that embedding a text again costs nothing.

A key holds the vector space, the device and the token ids: a vector is only returned for the same tokens, in the same
space, and was computed on the device that the reply names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from worker_node.core.types import Device
from worker_node.settings import NodeSettings

Key = tuple[str, Device, tuple[int, ...]]
Vector = npt.NDArray[np.float32]


@dataclass(slots=True)
class EmbeddingCache:
    """Keeps the `capacity` most recently used texts; 0 keeps none."""

    capacity: int
    _vectors: OrderedDict[Key, Vector] = field(default_factory=OrderedDict)

    def look_up(self, space: str, device: Device, rows: Sequence[Sequence[int]]) -> list[Vector | None]:
        """Return the vector of each row of token ids, or None where it is not kept."""
        if not self.capacity:
            return [None] * len(rows)
        return [self._get((space, device, tuple(row))) for row in rows]

    def _get(self, key: Key) -> Vector | None:
        vector = self._vectors.get(key)
        if vector is not None:
            self._vectors.move_to_end(key)
        return vector

    def keep(self, space: str, device: Device, rows: Sequence[Sequence[int]], vectors: Vector) -> None:
        """Store the vectors, one a row, and evict the least recently used ones."""
        # A request larger than the cache would only wash it out, its own first rows included.
        for row, vector in list(zip(rows, vectors, strict=True))[-self.capacity :] if self.capacity else ():
            self._vectors[space, device, tuple(row)] = vector.copy()
        while len(self._vectors) > self.capacity:
            self._vectors.popitem(last=False)

    async def close(self) -> None:
        """Drop all vectors."""
        self._vectors.clear()

    def __len__(self) -> int:
        return len(self._vectors)


def embedding_cache(settings: NodeSettings) -> EmbeddingCache:
    """The cache of a node."""
    return EmbeddingCache(settings.embedding_cache)
