"""Rows of Parquet files; what the footer tells of their values, and a bound on the size of pages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from backend_client.bulk.inputs import Fragment, InputFile
from backend_client.bulk.job import CHUNK_BYTES, BulkJob, Chunk, Rejection
from backend_client.bulk.optional import need
from backend_client.bulk.readers.source import InputSource, opened
from backend_client.bulk.types import Bounds, Kind, is_nested_dictionary, kind_of, leaves_of, without_views

_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


def kinds_in(schema: Any, file: Any) -> list[Kind]:
    """The kind of each column of a `ParquetFile`, whose Arrow schema is given."""
    leaves = [leaf for column in schema for leaf in leaves_of(column.type)]
    # A type whose leaves are counted otherwise than here would move the bounds to other columns.
    known = len(leaves) == file.metadata.num_columns
    bounds = iter([_bounds(leaf, file, index) if known else None for index, leaf in enumerate(leaves)])
    return [kind_of(column.type, bounds) for column in schema]


def _bounds(leaf: Any, file: Any, index: int) -> Bounds | None:
    """Between which values a column of 64-bit integers, days or ticks is, over all row groups. Others fit anyway."""
    types = need("pyarrow").types
    if not _is_counted(leaf):
        return None
    raw = not types.is_integer(leaf)
    if types.is_timestamp(leaf):
        stored = json.loads(file.schema.column(index).logical_type.to_json())
        if _UNITS.get(stored.get("timeUnit")) != leaf.unit:
            return None
    low: list[int] = []
    high: list[int] = []
    for group in range(file.metadata.num_row_groups):
        column = file.metadata.row_group(group).column(index)
        statistics = column.statistics
        if statistics is None:
            return None
        if statistics.has_min_max:
            low.append(statistics.min_raw if raw else statistics.min)
            high.append(statistics.max_raw if raw else statistics.max)
        elif not (statistics.has_null_count and statistics.null_count == column.num_values):
            return None
    return (min(low), max(high)) if low else (0, 0)


def _is_counted(leaf: Any) -> bool:
    types = need("pyarrow").types
    tests = (types.is_int64, types.is_uint64, types.is_date32, types.is_timestamp, types.is_duration)
    return any(test(leaf) for test in tests)


# How large the pages of a Parquet file are once they are decoded, from their headers alone.
#
# Arrow decodes a page as a whole, and its API tells only the sum over all pages of a column in a row group.

LARGEST_PAGE = 256 * 1024 * 1024
"""In bytes. Decoding a page takes up to three times as much memory."""

# Most headers are shorter; statistics of long texts make one longer, and Arrow ends at so many bytes.
_HEADER_BYTES, _LONGEST_HEADER = 512, 16 * 1024 * 1024
# Types of Thrift's compact protocol.
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12
_UNCOMPRESSED, _COMPRESSED = 2, 3
_DEEPEST = 8


class PageTooLarge(Exception):
    """A page would take more memory than a reader may use."""


def check_pages(source: InputSource, metadata: Any, groups: Sequence[int], columns: Collection[str] | None) -> None:
    """Raise PageTooLarge for a page or dictionary of more than `LARGEST_PAGE` bytes in these row groups and columns.

    `columns` are names, None for all. Reads nothing where all pages of a column together are no larger. Raises
    ValueError for a header that makes no sense, OSError.
    """
    for group in groups:
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            if chunk.total_uncompressed_size <= LARGEST_PAGE or not _is_among(chunk.path_in_schema, columns):
                continue
            for _, size in page_sizes(source, chunk):
                if size > LARGEST_PAGE:
                    raise PageTooLarge(
                        f"the column {chunk.path_in_schema} has a page of {size} bytes, and a reader takes at most "
                        f"{LARGEST_PAGE}: write the file with smaller pages"
                    )


def _is_among(path: str, columns: Collection[str] | None) -> bool:
    return columns is None or any(path == name or path.startswith(f"{name}.") for name in columns)


def page_sizes(source: InputSource, chunk: Any) -> Iterator[tuple[int, int]]:
    """(bytes in the file with the header, bytes when decoded) of each page of a column chunk, dictionary first."""
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        place = min(place, chunk.dictionary_page_offset)
    end = place + chunk.total_compressed_size
    while place < end:
        header, length = _header_at(source, place)
        compressed, uncompressed = header.get(_COMPRESSED, -1), header.get(_UNCOMPRESSED, -1)
        if compressed < 0 or uncompressed < 0:
            raise ValueError("a page header without sizes")
        yield length + compressed, uncompressed
        place += length + compressed


def _header_at(source: InputSource, place: int) -> tuple[dict[int, int], int]:
    """The integers of the header at a place, by field, and how long the header is."""
    size = _HEADER_BYTES
    while True:
        source.seek(place)
        data = source.read(size)
        header = _Compact(data)
        try:
            return header.integers(), header.place
        except IndexError:
            if len(data) < size or size >= _LONGEST_HEADER:
                raise ValueError("a page header that does not end") from None
            size *= 8


class _Compact:
    """Reads Thrift's compact protocol, as far as page headers use it. Raises IndexError where the data ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def integers(self, depth: int = 0) -> dict[int, int]:
        """Read a struct; its integers by field."""
        found: dict[int, int] = {}
        field = 0
        while (head := self._byte()) != _STOP:
            kind, delta = head & 15, head >> 4
            field = field + delta if delta else self._integer()
            if _BYTE < kind < _DOUBLE:
                found[field] = self._integer()
            elif kind not in {_TRUE, _FALSE}:
                self._skip(kind, depth)
        return found

    def _skip(self, kind: int, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError("a page header that is nested too deeply")
        if kind in {_TRUE, _FALSE, _BYTE}:
            self._take(1)
        elif kind < _DOUBLE:
            self._integer()
        elif kind == _DOUBLE:
            self._take(8)
        elif kind == _BINARY:
            self._take(self._unsigned())
        elif kind == _STRUCT:
            self.integers(depth + 1)
        elif kind in {_LIST, _SET}:
            head = self._byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self._unsigned()):
                self._skip(head & 15, depth + 1)
        else:
            raise ValueError(f"a page header with a field of type {kind}")

    def _byte(self) -> int:
        return self._take(1)

    def _take(self, count: int) -> int:
        """Go on by so many bytes; the first of them, 0 for none."""
        first = self._data[self.place] if count else 0
        if self.place + count > len(self._data):
            raise IndexError
        self.place += count
        return first

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a page header with a number of more than 64 bits")

    def _integer(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)


# Rows of a Parquet file by their numbers.

_BUFFER_BYTES = 1024 * 1024
_TOO_MANY_BYTES = 4 * CHUNK_BYTES


def read(fragment: Fragment, job: BulkJob, size: int) -> Iterator[Chunk]:
    """The rows of the fragment. What cannot be decoded is one rejection for all rows that are left."""
    pa = need("pyarrow")
    pq = need("pyarrow.parquet")
    with opened(fragment.file) as source:
        position = fragment.start
        try:
            # A buffer makes it read pages one after another; without one, all of a row group is in memory.
            file = pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True)
            check_pages(source, file.metadata, _groups(file.metadata, fragment)[0], _columns_read(job))
            size = _rows_at_once(file.metadata, fragment, size)
            while position < fragment.stop:
                for table in _tables(file, replace(fragment, start=position), job, size):
                    yield _chunk(table, position, job)
                    position += table.num_rows
                    if table.nbytes > _TOO_MANY_BYTES and size > 1:
                        # Rows that take little room in the file, as a dictionary, or that are larger than most.
                        size = max(1, size * CHUNK_BYTES // table.nbytes)
                        break
                else:
                    if position < fragment.stop:
                        raise ValueError("it has fewer rows than its footer says")
        except PageTooLarge as error:
            yield Chunk(None, [], [], [Rejection(position, str(error), count=fragment.stop - position)])
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
        table = table.cast(without_views(table.schema))
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
    inside = any(is_nested_dictionary(column.type) for column in file.schema_arrow)
    for some in [[group] for group in groups] if inside else [groups]:
        yield from file.iter_batches(size, row_groups=some, columns=columns, use_threads=False)


def _rows_at_once(metadata: Any, fragment: Fragment, most: int) -> int:
    """As many rows as make a chunk, by the mean size of rows in the row groups of the fragment."""
    groups, _ = _groups(metadata, fragment)
    found = [metadata.row_group(index) for index in groups]
    lengths = [group.total_byte_size // max(1, group.num_rows) for group in found]
    largest: int = max([1, *lengths])
    return max(1, min(most, CHUNK_BYTES // largest))


def columns(file: InputFile, _: BulkJob) -> tuple[Any, list[Kind]]:
    """The schema in the file's footer, and what its statistics tell of each column."""
    pa = need("pyarrow")
    pq = need("pyarrow.parquet")
    with opened(file) as source:
        try:
            parquet = pq.ParquetFile(source)
            schema = without_views(parquet.schema_arrow)
            return schema, kinds_in(schema, parquet)
        except (pa.ArrowException, OSError, ValueError) as error:
            if source.failure is not None:
                raise source.failure from error
            return pa.schema([]), []


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
