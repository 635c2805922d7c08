"""Rows of Parquet files by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backend_client.bulk.inputs import Fragment, InputFile, opened
from backend_client.bulk.job import CHUNK_BYTES, BulkJob, Chunk, Rejection
from backend_client.bulk.optional import need

_BUFFER_BYTES = 1024 * 1024


def read(fragment: Fragment, job: BulkJob, size: int) -> Iterator[Chunk]:
    """The rows of the fragment. What cannot be decoded is one rejection for all rows that are left."""
    pa = need("pyarrow")
    pq = need("pyarrow.parquet")
    with opened(fragment.file) as source:
        position = fragment.start
        try:
            # A buffer makes it read pages one after another; without one, all of a row group is in memory.
            file = pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True)
            size = _rows_at_once(file.metadata, fragment, size)
            for table in _tables(file, fragment, job, size):
                yield _chunk(table, position, job)
                position += table.num_rows
            if position < fragment.stop:
                raise ValueError("it has fewer rows than its footer says")
        except (pa.ArrowException, OSError, ValueError) as error:
            if source.failure is not None:
                raise source.failure from error
            reason = f"the file is damaged: {str(error).partition(chr(10))[0][:200]}"
            yield Chunk(None, [], [], [Rejection(position, reason, count=fragment.stop - position)])


def _tables(file: Any, fragment: Fragment, job: BulkJob, size: int) -> Iterator[Any]:
    """The rows of the fragment, at most `size` at a time."""
    pa = need("pyarrow")
    groups, skip = _groups(file.metadata, fragment)
    columns = _columns_read(job)
    left = fragment.stop - fragment.start
    for batch in _batches(file, groups, size, columns):
        table = pa.Table.from_batches([batch])
        if skip >= table.num_rows:
            skip -= table.num_rows
            continue
        table = table.slice(skip, left)
        skip = 0
        left -= table.num_rows
        if table.num_rows:
            yield table
        if not left:
            return


def _batches(file: Any, groups: list[int], size: int, columns: list[str] | None) -> Iterator[Any]:
    # Dictionaries in lists and structs: Arrow makes no batch of them that spans row groups.
    inside = any(column.type.num_fields and "dictionary<" in str(column.type) for column in file.schema_arrow)
    for some in [[group] for group in groups] if inside else [groups]:
        yield from file.iter_batches(size, row_groups=some, columns=columns, use_threads=False)


def _rows_at_once(metadata: Any, fragment: Fragment, most: int) -> int:
    """As many rows as make a chunk, by the mean size of rows in the row groups of the fragment."""
    groups, _ = _groups(metadata, fragment)
    found = [metadata.row_group(index) for index in groups]
    lengths = [group.total_byte_size // max(1, group.num_rows) for group in found]
    largest: int = max([1, *lengths])
    return max(1, min(most, CHUNK_BYTES // largest))


def columns(file: InputFile, _: BulkJob) -> Any:
    """The schema in the file's footer."""
    pa = need("pyarrow")
    pq = need("pyarrow.parquet")
    with opened(file) as source:
        try:
            return pq.ParquetFile(source).schema_arrow
        except (pa.ArrowException, OSError, ValueError) as error:
            if source.failure is not None:
                raise source.failure from error
            return pa.schema([])


def _columns_read(job: BulkJob) -> list[str] | None:
    """Their names; None for all."""
    if job.keep is None:
        return None
    needed = [job.column] if job.id_column is None else [job.column, job.id_column]
    return [*dict.fromkeys([*job.keep, *needed])]


def _groups(metadata: Any, fragment: Fragment) -> tuple[list[int], int]:
    """The row groups that hold the fragment, and how many rows come before it in the first."""
    groups: list[int] = []
    skip = start = 0
    for index in range(metadata.num_row_groups):
        stop = start + metadata.row_group(index).num_rows
        if start < fragment.stop and fragment.start < stop:
            if not groups:
                skip = fragment.start - start
            groups.append(index)
        start = stop
    return groups, skip


def _chunk(table: Any, position: int, job: BulkJob) -> Chunk:
    if job.column not in table.column_names:
        reason = f"there is no column {job.column}"
        rejected = [Rejection(position, reason, count=table.num_rows)]
        return Chunk(None, [], [], rejected)
    rows = list(range(position, position + table.num_rows))
    inputs = _values(table.column(job.column))
    has_ids = job.id_column is not None and job.id_column in table.column_names
    ids = _values(table.column(job.id_column)) if has_ids else None
    if job.keep is not None:
        table = table.select([name for name in job.keep if name in table.column_names])
    return Chunk(table, rows, inputs, [], ids)


def _values(column: Any) -> list[Any]:
    """The values of a column; bytes in place of a string that is not UTF-8.

    Writers of old, and Spark on demand, store strings as bytes without saying that they are text: UTF-8 is text.
    """
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        pa = need("pyarrow")
        values = column.cast(pa.large_binary()).to_pylist()
    if isinstance(next((value for value in values if value is not None), None), bytes):
        return [_text_or_bytes(value) for value in values]
    return values


def _text_or_bytes(value: bytes | None) -> Any:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value
