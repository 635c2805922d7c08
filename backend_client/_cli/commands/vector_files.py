"""The files that `npu-client embed --out` writes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backend_client.errors import ConfigurationError

# Rows in memory at a time: 8,192 of 1,024 dimensions are 32 MB.
_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Rows:
    """What is written. `vectors` is float32 (n, d); `ids` has one for each row, None where the input had none."""

    vectors: npt.NDArray[np.float32]
    ids: Iterator[Any]
    space: str
    model: str

    def chunks(self) -> Iterator[tuple[int, list[Any], npt.NDArray[np.float32]]]:
        """(first index, ids, vectors) of some rows at a time."""
        for start in range(0, len(self.vectors), _ROWS):
            vectors = self.vectors[start : start + _ROWS]
            yield start, list(islice(self.ids, len(vectors))), vectors


Write = Callable[[Path, Rows], None]


def writer_for(path: Path) -> Write:
    """The writer for a file's suffix. Raises ConfigurationError for another one, or when pyarrow is missing for it."""
    writers: dict[str, Write] = {".npy": _npy, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in writers:
        raise ConfigurationError(f"{path.name}: the output is one of {', '.join(writers)}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigurationError("parquet needs pyarrow: pip install 'npu-node[parquet]', or choose .npy or .jsonl")
    return writers[path.suffix]


def _npy(path: Path, rows: Rows) -> None:
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=rows.vectors.shape)
    for start, _, vectors in rows.chunks():
        out[start : start + len(vectors)] = vectors
    out.flush()


def _jsonl(path: Path, rows: Rows) -> None:
    with path.open("w", encoding="utf-8") as out:
        for start, ids, vectors in rows.chunks():
            for offset, (identity, vector) in enumerate(zip(ids, vectors, strict=True)):
                named = {} if identity is None else {"id": identity}
                line = {"index": start + offset, **named, "space": rows.space, "embedding": vector.tolist()}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")


def _parquet(path: Path, rows: Rows) -> None:
    # Only who asks for parquet has pyarrow.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    vector_type = pa.list_(pa.float32(), rows.vectors.shape[1])
    schema = pa.schema(
        [("index", pa.int64()), ("id", pa.string()), ("embedding", vector_type)],
        metadata={"space": rows.space, "model": rows.model},
    )
    with pq.ParquetWriter(path, schema) as out:
        for start, ids, vectors in rows.chunks():
            flat = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.float32())
            columns = [
                pa.array(range(start, start + len(vectors)), pa.int64()),
                pa.array([None if identity is None else str(identity) for identity in ids], pa.string()),
                pa.FixedSizeListArray.from_arrays(flat, type=vector_type),
            ]
            out.write_table(pa.Table.from_arrays(columns, schema=schema))
