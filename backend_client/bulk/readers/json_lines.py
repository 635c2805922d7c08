"""Rows of JSON lines: lines with the places where they begin, in bounded memory, and the types of their fields."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from backend_client.bulk.inputs import Fragment, InputFile, InputSource, opened
from backend_client.bulk.job import CHUNK_BYTES, BulkJob, Chunk, Rejection
from backend_client.bulk.optional import need

LONGEST_LINE = 16 * 1024 * 1024
_TOO_LONG = f"the line is longer than {LONGEST_LINE} bytes"
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
    packed = bool(fragment.file.compression)
    offset, stop = fragment.start, None if packed else fragment.stop
    with _decompressed(source, fragment.file.compression) if packed else io.BufferedReader(source, _BLOCK) as reader:
        try:
            if offset:
                # A line that begins here begins after a line end: the byte before tells.
                reader.seek(offset - 1)
                offset += _next_line(reader)[0] - 1
            while stop is None or offset < stop:
                length, line = _next_line(reader)
                if not length:
                    return
                yield offset, line
                offset += length
        except (OSError, ValueError) as error:
            if source.failure is not None:
                raise source.failure from error
            why = str(error).partition("\n")[0][:200]
            raise Damaged(offset, f"the file is damaged or ends early: {why}") from error


def _next_line(reader: Any) -> tuple[int, bytes | None]:
    """The length of the next line with its end, 0 at the end of the file, and the line unless it is too long."""
    line = reader.readline(LONGEST_LINE + 1)
    length = len(line)
    if line.endswith(b"\n") or length <= LONGEST_LINE:
        return length, line.removesuffix(b"\n")
    while not line.endswith(b"\n") and (line := reader.readline(_BLOCK)):
        length += len(line)
    return length, None


def _decompressed(source: InputSource, compression: str) -> Any:
    pa = need("pyarrow")
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(source, "r"), compression), _SMALL_BLOCK)


# Rows of JSON lines: objects, or plain strings, which are taken for the input itself, as lines of text files are.
#
# The columns of all lines are found before the first is served, so that all files have one schema. A column of nested
# values, or of several types, is JSON text.

_INT64 = range(-(2**63), 2**63)
# A float holds these exactly.
_EXACT = range(-(2**53), 2**53 + 1)
Row = dict[str, Any]


def read(fragment: Fragment, job: BulkJob, size: int) -> Iterator[Chunk]:
    """The rows of the fragment, in the columns of the job. A line that is not a row is rejected with its offset."""
    types = job.json_types
    if job.keep is not None:
        types = {name: types.get(name, "null") for name in job.keep}
    found: list[tuple[int, Row]] = []
    rejected: list[Rejection] = []
    begin = None
    for offset, row in _rows(fragment, job):
        # Before this row, as it may be a long one.
        begin = offset if begin is None else begin
        if len(found) + len(rejected) >= size or offset - begin >= CHUNK_BYTES:
            yield _chunk(found, rejected, types, job)
            found, rejected, begin = [], [], offset
        if isinstance(row, Rejection):
            rejected.append(row)
        elif problem := job.problem(row.get(job.column)):
            # Not in the table, whose types follow the other rows.
            rejected.append(Rejection(offset, problem, _id(row, job)))
        else:
            found.append((offset, row))
    if found or rejected:
        yield _chunk(found, rejected, types, job)


def columns(file: InputFile, job: BulkJob) -> dict[str, str]:
    """The JSON types of the columns of all lines, by name. The values of rows that are rejected have none."""
    types: dict[str, str] = {}
    for _, row in _rows(Fragment(file, 0, file.size), job):
        if not isinstance(row, Rejection):
            kept = not job.problem(row.get(job.column))
            for name, value in row.items():
                types[name] = _wider(types.get(name, "null"), _type(value) if kept else "null")
    return types


def merge(types: dict[str, str], others: Mapping[str, str]) -> None:
    """Widen `types` until they hold the values of the others too."""
    for name, other in others.items():
        types[name] = _wider(types.get(name, "null"), other)


def schema(types: Mapping[str, str]) -> Any:
    """The Arrow schema of columns of these types."""
    pa = need("pyarrow")
    known = {"null": pa.null(), "bool": pa.bool_(), "int": pa.int64(), "long": pa.int64(), "float": pa.float64()}
    return pa.schema([(name, known.get(kind, pa.string())) for name, kind in types.items()])


def _rows(fragment: Fragment, job: BulkJob) -> Iterator[tuple[int, Row | Rejection]]:
    with opened(fragment.file) as source:
        try:
            for offset, line in lines(source, fragment):
                if fragment.file.form == "txt":
                    yield offset, _text_row(offset, line, job)
                elif line is None or line.strip():
                    yield offset, _row(offset, line, job)
        except Damaged as error:
            yield error.offset, Rejection(error.offset, str(error), rest=True)


def _text_row(offset: int, line: bytes | None, job: BulkJob) -> Row | Rejection:
    """The line as it is; an empty one is a row, too, so that rows are counted as lines are."""
    try:
        return Rejection(offset, _TOO_LONG) if line is None else {job.column: line.removesuffix(b"\r").decode()}
    except UnicodeDecodeError:
        return Rejection(offset, "invalid UTF-8")


def _row(offset: int, line: bytes | None, job: BulkJob) -> Row | Rejection:
    if line is None:
        return Rejection(offset, _TOO_LONG)
    try:
        value = json.loads((line if offset else line.removeprefix(codecs.BOM_UTF8)).decode())
    except (ValueError, RecursionError) as error:
        return Rejection(offset, "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON")
    if isinstance(value, str):
        value = {job.column: value}
    if not isinstance(value, dict):
        return Rejection(offset, "neither an object nor a string")
    # A surrogate can stand only where JSON has an escape.
    if b"\\u" in line and not _encodable(value):
        return Rejection(offset, "a lone surrogate, which is not valid Unicode", _id(value, job))
    return value


def _id(row: Row, job: BulkJob) -> Any:
    return None if job.id_column is None else row.get(job.id_column)


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if value in _EXACT:
            return "int"
        return "long" if value in _INT64 else "json"
    if isinstance(value, float):
        return "float"
    return "str" if isinstance(value, str) else "json"


def _wider(one: str, other: str) -> str:
    """The type of a column with values of both."""
    if "null" in {one, other}:
        return other if one == "null" else one
    if one == other:
        return one
    if {one, other} == {"int", "long"}:
        return "long"
    return "float" if {one, other} == {"int", "float"} else "json"


def _chunk(found: list[tuple[int, Row]], rejected: list[Rejection], types: Mapping[str, str], job: BulkJob) -> Chunk:
    pa = need("pyarrow")
    fields = schema(types)
    arrays = [
        pa.array([_cell(row.get(column.name), types[column.name]) for _, row in found], column.type)
        for column in fields
    ]
    inputs = [row.get(job.column) for _, row in found]
    ids = None if job.id_column is None else [_id(row, job) for _, row in found]
    return Chunk(pa.Table.from_arrays(arrays, schema=fields), [offset for offset, _ in found], inputs, rejected, ids)


def _cell(value: Any, kind: str) -> Any:
    if kind == "json" and value is not None:
        return json.dumps(value, ensure_ascii=False)
    return float(value) if kind == "float" and value is not None else value
