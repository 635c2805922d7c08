"""How large the pages of a Parquet file are once they are decoded, from their headers alone.

Arrow decodes a page as a whole, and its API tells only the sum over all pages of a column in a row group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from backend_client.bulk.readers.source import InputSource

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
