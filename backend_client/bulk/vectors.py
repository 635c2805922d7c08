"""The vectors of a chunk, request by request as they came: nothing is copied on the way to the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from backend_client.bulk.optional import need


class Vectors:
    """Float32 vectors of `count` rows; those of rows that were refused are missing."""

    def __init__(self, count: int, dimensions: int) -> None:
        self._count = count
        self._dimensions = dimensions
        self._parts: dict[int, npt.NDArray[np.float32]] = {}

    def put(self, start: int, vectors: npt.NDArray[np.float32]) -> None:
        """Take the vectors of the rows from `start` on."""
        self._parts[start] = vectors

    def column(self, rows: list[int]) -> Any:
        """The vectors of these rows, which have some, as an Arrow column of fixed-size lists."""
        pa = need("pyarrow")
        parts = [self._parts[start] for start in sorted(self._parts)]
        if len(rows) < self._count:
            whole = np.empty((self._count, self._dimensions), np.float32)
            for start, vectors in self._parts.items():
                whole[start : start + len(vectors)] = vectors
            parts = [whole[rows]]
        arrays = [
            pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1), pa.float32()), self._dimensions)
            for part in parts
        ]
        return pa.chunked_array(arrays, pa.list_(pa.float32(), self._dimensions))
