"""One fragment from its rows to its committed file: read, serve, write, commit. A pure function of both.

The rejected rows are committed before the data, under a name with their digest: the data file's metadata refers to
them. Two attempts may reject different rows (a node had a bad hour); what counts is what the file that won refers to.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from backend_client.bulk.answers import Results, Work, cancelled
from backend_client.bulk.columns import conform, schema_of
from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import RESULT_TYPES, BulkJob, Chunk, Rejection
from backend_client.bulk.optional import need
from backend_client.bulk.output import BEGUN, METADATA_KEY, REJECTED, Receipt, committed
from backend_client.bulk.readers import CHUNK_ROWS, read
from backend_client.bulk.stores import OutputFailed, Store
from backend_client.lifetime import in_daemon_thread

R = TypeVar("R")

# The disk, the quota or the largest file is full; the file system is read-only.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


async def process(fragment: Fragment, job: BulkJob, store: Store, work: Work) -> Receipt:
    """Serve the fragment and commit its file, unless another process was first.

    Raises OSError when the input cannot be read, OutputFailed when the output cannot be written, and NPUError when
    the fleet cannot serve it.
    """
    began = time.monotonic()
    writer = await _output(lambda: _opened(fragment, job, store))
    if isinstance(writer, Receipt):
        return writer
    try:
        await _serve_rows(fragment, job, work, writer)
        seconds = round(time.monotonic() - began, 3)
        return await _output(lambda: _commit(fragment, store, writer, seconds))
    except BaseException:
        # Another fragment's failure may cancel this one even here; the temporary file must be gone all the same.
        await uninterrupted(in_daemon_thread(lambda: _abandon(fragment, store, writer), "abandon"))
        raise


def _opened(fragment: Fragment, job: BulkJob, store: Store) -> Writer | Receipt:
    """The writer of its file, or the receipt of the file that another process has committed.

    Marks the fragment as begun, once more where a process died with it: see `deaths`.
    """
    if (receipt := committed(store, fragment)) is not None:
        return receipt
    store.count(f"{BEGUN}/{fragment.id}")
    return Writer(store.temporary(fragment.id), fragment, job)


def _abandon(fragment: Fragment, store: Store, writer: Writer) -> None:
    writer.abandon()
    store.remove([f"{BEGUN}/{fragment.id}"])


async def _serve_rows(fragment: Fragment, job: BulkJob, work: Work, writer: Writer) -> None:
    """Read, serve and write all rows, with no more chunks in memory than the nodes need."""
    pending: deque[asyncio.Task[tuple[Chunk, Results]]] = deque()
    chunks = _chunks(fragment, job)

    async def serve(chunk: Chunk) -> tuple[Chunk, Results]:
        return chunk, await work.run(chunk)

    async def write_first() -> None:
        served = await pending.popleft()
        await _output(lambda: writer.add(*served))

    try:
        while (chunk := await in_daemon_thread(lambda: next(chunks, None), "read input")) is not None:
            while len(pending) > -(-work.rows_ahead // CHUNK_ROWS):
                await write_first()
            pending.append(asyncio.create_task(serve(chunk)))
        while pending:
            await write_first()
    finally:
        await cancelled(pending)


def _chunks(fragment: Fragment, job: BulkJob) -> Iterator[Chunk]:
    """The rows of the fragment in the columns of the output."""
    schema = schema_of(job.schema)
    for chunk in read(fragment, job):
        if chunk.rows:
            chunk.table = conform(chunk.table, schema)
        yield chunk


def _commit(fragment: Fragment, store: Store, writer: Writer, seconds: float) -> Receipt:
    rejected = b"".join(rejection.line(fragment.file.url) for rejection in writer.rejected)
    name = f"{fragment.id}.{hashlib.sha256(rejected).hexdigest()[:8]}.jsonl" if rejected else ""
    receipt = replace(writer.receipt(), rejected_file=name, seconds=seconds)
    known = {name: value for name, value in asdict(receipt).items() if name not in {"size", "sha256", "won"}}
    sha256 = writer.close({METADATA_KEY: json.dumps(known), "source": fragment.file.url})
    size = writer.path.stat().st_size
    if rejected:
        store.create(f"{REJECTED}/{name}", rejected)
    won = store.commit(writer.path, fragment.name)
    receipt = replace(receipt, size=size, sha256=sha256, won=won)
    if won:
        store.put(receipt.name, receipt.dump())
    store.remove([f"{BEGUN}/{fragment.id}"])
    return receipt


async def _output(work: Callable[[], R]) -> R:
    """Run blocking work on the output in a thread.

    Raises OutputFailed where every fragment would fail alike, and OSError for what may pass.
    """
    # A thread cannot be cancelled: who is goes when it has ended, so that nobody closes the file beneath it.
    try:
        return await uninterrupted(in_daemon_thread(work, "write output"))
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno not in _LASTING:
            raise
        problem = f"the output cannot be written: {error}"
    raise OutputFailed(f"{problem}; what was committed is kept: correct this and run the same command again")


async def uninterrupted(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end, however often the caller is cancelled meanwhile; it is raised only then."""
    task = asyncio.create_task(coroutine)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # it has been looked at: nothing is logged
    raise interruption


# The data file: chunks with their results become row groups of Parquet.

# Row groups smaller than this make a file slow to scan; larger ones only cost memory here.
_ROWS_PER_GROUP = 8192
_BYTES_PER_GROUP = 64 * 1024 * 1024
# Pages that fit into the processor's cache cost a fifth less to write than those of 1 MiB.
_PAGE_BYTES = 256 * 1024


class Writer:
    """Writes one file, and keeps account of its rows. Blocking. Raises OSError."""

    def __init__(self, path: Path, fragment: Fragment, job: BulkJob) -> None:
        self.path = path
        self.rejected: list[Rejection] = []
        self._fragment = fragment
        self._sums: Counter[str] = Counter()
        self._served: Counter[str] = Counter()
        self._schema = _schema(job)
        self._pending: list[Any] = []
        self._waiting = self._bytes = 0
        # By the names of leaves: vectors, which do not compress, and nested columns are left as they are.
        compression = dict.fromkeys(self._schema.names, "zstd") if job.kind == "embed" else "zstd"
        self._file = need("pyarrow.parquet").ParquetWriter(
            path,
            self._schema,
            compression=compression,
            data_page_size=_PAGE_BYTES,
            use_dictionary=["model", "node", "device", "space", "error", "source_file", "finish_reason"],
            write_statistics=[name for name in self._schema.names if name in {"source_row", job.id_column}],
        )

    def receipt(self) -> Receipt:
        """The account of all rows that were added."""
        return Receipt(
            fragment=self._fragment.id,
            rows=self._sums["rows"],
            rejected=sum(rejection.count for rejection in self.rejected),
            incomplete=sum(rejection.rest for rejection in self.rejected),
            tokens=self._sums["tokens"],
            generated_tokens=self._sums["num_generated_tokens"],
            npu_busy_us=self._sums["npu_busy_us"],
            served=dict(self._served),
        )

    def add(self, chunk: Chunk, results: Results) -> None:
        """Append the rows of a chunk that were not refused."""
        refused = [Rejection(chunk.rows[row], reason, chunk.id_of(row)) for row, reason in results.refused.items()]
        self.rejected += sorted([*chunk.rejected, *refused], key=lambda rejection: rejection.row)
        kept = [row for row in range(len(chunk.rows)) if row not in results.refused]
        if not kept:
            return
        pa = need("pyarrow")
        columns = [*_picked(chunk.table, kept).columns, results.values_of(kept)]
        columns += [
            pa.array([values[row] for row in kept], getattr(pa, RESULT_TYPES[name])())
            for name, values in results.columns.items()
        ]
        columns.append(pa.repeat(pa.scalar(self._fragment.file.url, pa.string()), len(kept)))
        columns.append(pa.array([chunk.rows[row] for row in kept], pa.int64()))
        table = pa.Table.from_arrays(columns, schema=self._schema)
        self._served.update(results.served)
        self._sums.update({"rows": len(kept), "tokens": results.tokens})
        for name in ("num_generated_tokens", "npu_busy_us"):
            self._sums[name] += sum(filter(None, results.columns[name]))
        self._pending.append(table)
        self._waiting += len(kept)
        self._bytes += table.nbytes
        if self._waiting >= _ROWS_PER_GROUP or self._bytes >= _BYTES_PER_GROUP:
            self._flush()

    def close(self, metadata: dict[str, str]) -> str:
        """Complete the file, with or without rows. Returns the SHA-256 of its content."""
        if self._pending:
            self._flush()
        self._file.add_key_value_metadata(metadata)
        self._file.close()
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def abandon(self) -> None:
        """Close the file without completing it, and remove it."""
        self._pending = []
        try:
            self._file.close()
        except OSError:
            pass
        finally:
            self.path.unlink(missing_ok=True)

    def _flush(self) -> None:
        table = need("pyarrow").concat_tables(self._pending)
        self._pending, self._waiting, self._bytes = [], 0, 0
        self._file.write_table(table, row_group_size=len(table))


def _schema(job: BulkJob) -> Any:
    """The columns of the output: the input's, the result, who answered, and where a row is from."""
    pa = need("pyarrow")
    columns = schema_of(job.schema)
    result = pa.list_(pa.float32(), max(1, job.dimensions)) if job.kind == "embed" else pa.string()
    added = [(job.result_column, result)]
    added += [(name, getattr(pa, kind)()) for name, kind in RESULT_TYPES.items()]
    added += [("source_file", pa.string()), ("source_row", pa.int64())]
    return pa.schema([*columns, *(pa.field(*each) for each in added)], columns.metadata)


def _picked(table: Any, rows: list[int]) -> Any:
    """These rows, which are in order: as slices, because Arrow's `take` does not know every type."""
    if len(rows) == table.num_rows:
        return table
    starts = [place for place, row in enumerate(rows) if not place or row != rows[place - 1] + 1]
    runs = itertools.pairwise([*starts, len(rows)])
    return need("pyarrow").concat_tables([table.slice(rows[start], stop - start) for start, stop in runs])
