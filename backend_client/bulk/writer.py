"""The data file of a fragment: chunks with their results become row groups of a Parquet file."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from backend_client.bulk.answers import Results
from backend_client.bulk.columns import schema_of
from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import BulkJob, Chunk
from backend_client.bulk.optional import need
from backend_client.bulk.types import conform

# Row groups smaller than this make a file slow to scan; larger ones only cost memory here.
_ROWS_PER_GROUP = 8192
_BYTES_PER_GROUP = 64 * 1024 * 1024
# Pages that fit into the processor's cache cost a fifth less to write than those of 1 MiB.
_PAGE_BYTES = 256 * 1024


class Writer:
    """Writes one file. Blocking. Raises OSError."""

    def __init__(self, path: Path, fragment: Fragment, job: BulkJob) -> None:
        self.path = path
        self._fragment = fragment
        self._job = job
        self._columns = schema_of(job)
        # Readers of JSON lines have made their text already.
        mixed = fragment.file.form != "jsonl"
        self._as_json = {name for name, kind in job.json_types.items() if kind == "json"} if mixed else set()
        self._file: Any = None
        self._pending: list[Any] = []
        self._waiting = self._bytes = 0
        self._written = 0

    @property
    def pending_rows(self) -> int:
        """The rows that it has got."""
        return self._written + self._waiting

    def add(self, chunk: Chunk, kept: list[int], results: Results, answered: list[int]) -> None:
        """Append the rows `kept` of a chunk; `answered` are their places in the results."""
        if not kept:
            return
        pa = need("pyarrow")
        whole = len(kept) == chunk.table.num_rows
        table = conform(chunk.table if whole else chunk.table.take(pa.array(kept)), self._columns, self._as_json)
        indices = None if len(answered) == results.count else pa.array(answered)
        table = table.append_column(self._job.result_column, self._values(results, answered))
        for name, column in results.columns().items():
            table = table.append_column(name, column if indices is None else column.take(indices))
        source = pa.repeat(pa.scalar(self._fragment.file.url, pa.string()), len(kept))
        table = table.append_column("source_file", source)
        rows = chunk.rows if whole else [chunk.rows[row] for row in kept]
        table = table.append_column("source_row", pa.array(rows, pa.int64()))
        self._pending.append(table)
        self._waiting += len(kept)
        self._bytes += table.nbytes
        if self._waiting >= _ROWS_PER_GROUP or self._bytes >= _BYTES_PER_GROUP:
            self._flush()

    def close(self, metadata: dict[str, str]) -> str:
        """Complete the file, with or without rows. Returns the SHA-256 of its content."""
        if self._pending:
            self._flush()
        if self._file is None:
            pa = need("pyarrow")
            types = {"embeddings": pa.list_(pa.float32(), max(1, self._job.dimensions)), "generated_text": pa.string()}
            column = self._job.result_column
            added = [(column, types[column])]
            added += [(name, values.type) for name, values in Results(0).columns().items()]
            added += [("source_file", pa.string()), ("source_row", pa.int64())]
            self._open(pa.schema([*self._columns, *(pa.field(*each) for each in added)], self._columns.metadata))
        self._file.add_key_value_metadata(metadata)
        self._file.close()
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def abandon(self) -> None:
        """Close the file without completing it, and remove it."""
        self._pending = []
        try:
            if self._file is not None:
                self._file.close()
        except OSError:
            pass
        finally:
            self.path.unlink(missing_ok=True)

    def _values(self, results: Results, answered: list[int]) -> Any:
        pa = need("pyarrow")
        if self._job.kind == "generate":
            return pa.array([results.values[row] for row in answered], pa.string())
        return results.values.column(answered)

    def _flush(self) -> None:
        pa = need("pyarrow")
        table = pa.concat_tables(self._pending)
        self._pending, self._waiting, self._bytes = [], 0, 0
        if self._file is None:
            self._open(table.schema)
        self._file.write_table(table, row_group_size=len(table))
        self._written += len(table)

    def _open(self, schema: Any) -> None:
        pq = need("pyarrow.parquet")
        # Vectors do not compress; everything else does.
        vectors = {"embeddings.list.element": "none"} if self._job.kind == "embed" else {}
        self._file = pq.ParquetWriter(
            self.path,
            schema,
            compression={**dict.fromkeys(_leaves(schema), "zstd"), **vectors},
            data_page_size=_PAGE_BYTES,
            use_dictionary=["model", "node", "device", "space", "error", "source_file", "finish_reason"],
            write_statistics=[name for name in schema.names if name in {"source_row", self._job.id_column}],
        )


@functools.lru_cache(maxsize=8)
def _leaves(schema: Any) -> list[str]:
    """The columns of a schema as Parquet counts them: each leaf of a nested one."""
    pq = need("pyarrow.parquet")
    pa = need("pyarrow")
    sink = pa.BufferOutputStream()
    pq.write_metadata(schema, sink)
    parquet = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [parquet.column(index).path for index in range(len(parquet.names))]
