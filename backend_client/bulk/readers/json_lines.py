"""Rows of JSON lines: objects, or plain strings, which are taken for the input itself.

The columns of all lines are found before the first is served, so that all files have one schema. A column whose values
are nested or of several types is JSON text.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from backend_client.bulk.common_type import Kind
from backend_client.bulk.fragments import Fragment, InputFile
from backend_client.bulk.job import BulkJob
from backend_client.bulk.optional import need
from backend_client.bulk.readers.lines import LONGEST_LINE, Damaged, lines
from backend_client.bulk.readers.source import opened
from backend_client.bulk.rows import CHUNK_BYTES, Chunk, Rejection

_INT64 = range(-(2**63), 2**63)
# A float holds these exactly.
_EXACT = range(-(2**53), 2**53 + 1)
_REASONS = {
    UnicodeDecodeError: "invalid UTF-8",
    OverflowError: "a number that is larger than any double",
    Exception: "not JSON",
}
Row = dict[str, Any]


def read(fragment: Fragment, job: BulkJob, size: int) -> Iterator[Chunk]:
    """The rows of the fragment. A line that is no row is rejected with its offset.

    The columns are those of the job; of the fragment where the job has none yet, as in a dry run.
    """
    types = job.json_types or _types(fragment, job)
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
        else:
            found.append((offset, row))
    if found or rejected:
        yield _chunk(found, rejected, types, job)


def columns(file: InputFile, job: BulkJob) -> dict[str, str]:
    """The JSON types of the columns of all lines, by name."""
    return _types(Fragment(file, 0, file.size), job)


def merge(types: dict[str, str], others: Mapping[str, str]) -> None:
    """Widen `types` until they hold the values of the others too."""
    for name, other in others.items():
        types[name] = _wider(types.get(name, "null"), other)


def kinds(types: Mapping[str, str]) -> tuple[Any, list[Kind]]:
    """The Arrow schema of columns of these types, and what is known of each."""
    made = schema(types)
    bounds = {"int": (_EXACT[0], _EXACT[-1])}
    return made, [Kind(column.type, bounds.get(types[column.name])) for column in made]


def schema(types: Mapping[str, str]) -> Any:
    """The Arrow schema of columns of these types."""
    pa = need("pyarrow")
    integer = pa.int64()
    known = {"null": pa.null(), "bool": pa.bool_(), "int": integer, "long": integer, "float": pa.float64()}
    return pa.schema([(name, known.get(kind, pa.string())) for name, kind in types.items()])


def _types(fragment: Fragment, job: BulkJob) -> dict[str, str]:
    types: dict[str, str] = {}
    for _, row in _rows(fragment, job):
        if not isinstance(row, Rejection):
            for name, value in row.items():
                types[name] = _wider(types.get(name, "null"), _type(value))
    return types


def _rows(fragment: Fragment, job: BulkJob) -> Iterator[tuple[int, Row | Rejection]]:
    with opened(fragment.file) as source:
        try:
            for offset, line in lines(source, fragment):
                if line is None or line.strip():
                    yield offset, _row(offset, line, job)
        except Damaged as error:
            yield error.offset, Rejection(error.offset, str(error), rest=True)


def _row(offset: int, line: bytes | None, job: BulkJob) -> Row | Rejection:
    if line is None:
        return Rejection(offset, f"the line is longer than {LONGEST_LINE} bytes")
    try:
        value = _parsed(line if offset else line.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError, OverflowError) as error:
        return Rejection(offset, next(why for kind, why in _REASONS.items() if isinstance(error, kind)))
    if isinstance(value, str):
        value = {job.column: value}
    if not isinstance(value, dict):
        return Rejection(offset, "neither an object nor a string")
    # A surrogate can stand only where JSON has an escape.
    if b"\\u" in line and not _encodable(value):
        return Rejection(offset, "a lone surrogate, which is not valid Unicode", _plain_id(value, job))
    return value


def _parsed(line: bytes) -> Any:
    """The value of a line. Raises one of `_REASONS`."""
    value = json.loads(line.decode())
    if isinstance(value, dict) and any(map(_may_be_infinite, value.values())):
        json.loads(line, parse_float=_finite)
    return value


def _may_be_infinite(value: Any) -> bool:
    """Whether a number in it may have been too large: `Infinity` gives the same, and nested values are not searched."""
    kind = value.__class__
    return kind is list or kind is dict or (kind is float and math.isinf(value))


def _finite(digits: str) -> float:
    """The number. Raises OverflowError where it would become infinite."""
    if math.isinf(value := float(digits)):
        raise OverflowError
    return value


def _plain_id(row: Row, job: BulkJob) -> Any:
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
    ids = None if job.id_column is None else [row.get(job.id_column) for _, row in found]
    return Chunk(pa.Table.from_arrays(arrays, schema=fields), [offset for offset, _ in found], inputs, rejected, ids)


def _cell(value: Any, kind: str) -> Any:
    if kind == "json" and value is not None:
        return json.dumps(value, ensure_ascii=False)
    return float(value) if kind == "float" and value is not None else value
