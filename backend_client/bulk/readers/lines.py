"""Lines of a file with the places where they begin, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from backend_client.bulk.fragments import Fragment
from backend_client.bulk.optional import need
from backend_client.bulk.readers.source import InputSource

LONGEST_LINE = 16 * 1024 * 1024
_BLOCK = 1024 * 1024
# Of a stream that ends early, what comes before the block in which it does is kept.
_SMALL_BLOCK = 16 * 1024


class Damaged(Exception):
    """The stream cannot be decompressed from `offset` on."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(why)
        self.offset = offset


def lines(source: InputSource, fragment: Fragment) -> Iterator[tuple[int, bytes | None]]:
    """(offset, line without its end) of each line that begins in the fragment; None for one that is too long.

    Offsets are in the decompressed stream. Raises Damaged, OSError.
    """
    if fragment.file.compression:
        yield from split(_decompressed(source, fragment.file.compression), 0, None)
        return
    start = fragment.start
    if start:
        # A line that begins here begins after a line end: the byte before tells.
        source.seek(start - 1)
        blocks = split(_blocks(source), start - 1, fragment.stop)
        next(blocks, None)
        yield from blocks
    else:
        yield from split(_blocks(source), 0, fragment.stop)


def split(blocks: Iterator[bytes], offset: int, stop: int | None) -> Iterator[tuple[int, bytes | None]]:
    """The lines of blocks that begin at `offset`, up to the last one that begins before `stop`."""
    parts: list[bytes] = []
    length = 0
    for block in blocks:
        begin = 0
        while (end := block.find(b"\n", begin)) >= 0:
            if stop is not None and offset >= stop:
                return
            length += end - begin
            parts.append(block[begin:end])
            yield offset, _line(parts, length)
            offset += length + 1
            parts, length, begin = [], 0, end + 1
        length += len(block) - begin
        # Of a line that is too long only its length is kept.
        if length <= LONGEST_LINE:
            parts.append(block[begin:])
        else:
            parts = []
        if stop is not None and offset >= stop:
            return
    if length and (stop is None or offset < stop):
        yield offset, _line(parts, length)


def _line(parts: list[bytes], length: int) -> bytes | None:
    return b"".join(parts) if length <= LONGEST_LINE else None


def _blocks(source: InputSource) -> Iterator[bytes]:
    while block := source.read(_BLOCK):
        yield block


def _decompressed(source: InputSource, compression: str) -> Iterator[bytes]:
    pa = need("pyarrow")
    offset = 0
    try:
        stream = pa.CompressedInputStream(pa.PythonFile(source, "r"), compression)
        while block := stream.read(_SMALL_BLOCK):
            yield block
            offset += len(block)
    except (pa.ArrowException, OSError, ValueError) as error:
        if source.failure is not None:
            raise source.failure from error
        why = str(error).partition("\n")[0][:200]
    else:
        return
    raise Damaged(offset, f"the file is damaged or ends early: {why}")
