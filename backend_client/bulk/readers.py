"""The rows of the input: all files are looked at once, then fragments are read chunk by chunk. Blocking.

Begin with `survey` and `read`. All files of an output have one schema.
"""

from __future__ import annotations

import base64
import codecs
import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from backend_client.bulk.inputs import (
    Fragment,
    InputChanged,
    InputDamaged,
    InputFile,
    check_unchanged,
    cut_parquet,
    opened,
)
from backend_client.bulk.job import CHUNK_BYTES, RESULT_COLUMNS, BulkJob, Chunk, Rejection
from backend_client.bulk.stores import need
from backend_client.errors import ConfigurationError
from backend_client.lifetime import map_in_daemon_threads

CHUNK_ROWS = 1024
_FILES_AT_ONCE = 16
_NAMES_SHOWN = 20
# In place of an Arrow type: a column of JSON lines whose values are nested or of several types.
_JSON_TEXT = "JSON text"


def read(fragment: Fragment, job: BulkJob) -> Iterator[Chunk]:
    """The rows of a fragment in the columns of the output, one chunk in memory; damaged content is rejected.

    Raises OSError when the store fails, InputChanged, and ConfigurationError for a value that its column cannot hold.
    """
    if fragment.problem:
        yield Chunk(None, [], [], [], [Rejection(0, fragment.problem, rest=True)])
    else:
        schema = schema_of(job.schema)
        for chunk in (_read_parquet if fragment.file.form == "parquet" else _read_lines)(fragment, job):
            if chunk.rows:
                chunk.table = conform(chunk.table, schema)
            yield chunk
    check_unchanged(fragment.file)


def survey(job: BulkJob, files: Sequence[InputFile]) -> tuple[BulkJob, list[Fragment]]:
    """The job with its columns, and all its fragments: reads the footers of Parquet, and all other lines, once.

    Raises OSError when a store fails, ConfigurationError for files that changed and for columns that are missing,
    there twice, of different types, or added by the output.
    """

    def look(file: InputFile) -> tuple[Any, list[Fragment]]:
        found = (_survey_parquet if file.form == "parquet" else _survey_lines)(file, job)
        check_unchanged(file)
        return found

    try:
        # Lines may be read for minutes: an interrupted process must not wait for that, as it does for an executor.
        found = map_in_daemon_threads(look, files, _FILES_AT_ONCE, "survey")
    except InputChanged as error:
        raise ConfigurationError(str(error)) from None
    job = _with_columns(job, files, [columns for columns, _ in found])
    return job, [fragment for _, fragments in found for fragment in fragments]


# The columns of all files become one schema.


def _with_columns(job: BulkJob, files: Sequence[InputFile], found: Sequence[Any]) -> BulkJob:
    """`found` has the types by name for JSON lines, otherwise Arrow's schema."""
    pa = need("pyarrow")
    types: dict[str, str] = {}
    for each in found:
        if isinstance(each, dict):
            for name, kind in each.items():
                types[name] = _wider(types.get(name, "null"), kind)
    # Of each column, the types that it has with the first file that has each.
    columns: dict[str, dict[Any, InputFile]] = {}
    first: dict[str, Any] = {}
    metadata = None
    for file, each in zip(files, found, strict=True):
        is_json = isinstance(each, dict)
        schema = _json_schema({name: types[name] for name in each}) if is_json else each
        _check_once(schema.names, file, job)
        metadata = metadata or schema.metadata
        for column in schema:
            kind = _JSON_TEXT if is_json and types[column.name] == "json" else column.type
            columns.setdefault(column.name, {}).setdefault(kind, file)
            first.setdefault(column.name, column)
    kept = [name for name in (job.keep or columns) if name in columns]
    _check_names(list(columns), kept, job)
    fields = [pa.field(name, _common_type(name, columns[name]), metadata=first[name].metadata) for name in kept]
    if not columns:
        fields = [pa.field(name, pa.null()) for name in job.keep or ()]
    encoded = base64.b64encode(pa.schema(fields, metadata).serialize().to_pybytes()).decode()
    return replace(job, schema=encoded, json_types=types)


def _common_type(name: str, files: dict[Any, InputFile]) -> Any:
    """The type of a column in the output. Raises ConfigurationError for types that differ.

    Only numbers may: they become the wider type, and `conform` refuses a value that it would round.
    """
    pa = need("pyarrow")
    kinds = [kind for kind in files if kind != pa.null()]
    if all(kind != _JSON_TEXT and (pa.types.is_integer(kind) or pa.types.is_floating(kind)) for kind in kinds):
        schemas = [pa.schema([("column", kind)]) for kind in files]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    if len(kinds) == 1:
        return pa.string() if kinds[0] == _JSON_TEXT else kinds[0]
    found = " and ".join(f"{kind} in {files[kind].url}" for kind in kinds[:2])
    raise ConfigurationError(
        f"the column {name} is {found}: convert one of them, leave it out with --keep-columns, or run two jobs"
    )


def _check_once(names: list[str], file: InputFile, job: BulkJob) -> None:
    """Raise ConfigurationError for a name that is there twice and not left out."""
    if job.keep is not None:
        names = [name for name in names if name in {*job.keep, job.column, job.id_column}]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"{file.url} has more than one column {twice[0]!r}: rename them, or choose others with --keep-columns"
        )


def _check_names(names: list[str], kept: list[str], job: BulkJob) -> None:
    """Raise ConfigurationError for a column that no file has, or that the output adds."""
    wanted = dict.fromkeys([job.column, *([job.id_column] if job.id_column is not None else []), *(job.keep or ())])
    missing = [name for name in wanted if name not in names]
    if names and missing:
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
        raise ConfigurationError(f"no file of the input has a column {missing[0]!r}; it has: {shown}")
    taken = [name for name in (job.result_column, *RESULT_COLUMNS) if name in kept]
    if taken:
        raise ConfigurationError(
            f"the input has columns that the output adds: {', '.join(taken)}; rename them, or choose the columns to "
            "keep with --keep-columns"
        )


@functools.lru_cache(maxsize=8)
def schema_of(encoded: str) -> Any:
    pa = need("pyarrow")
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))


def conform(table: Any, schema: Any) -> Any:
    pa = need("pyarrow")
    columns = []
    for column in schema:
        found = table.column(column.name) if column.name in table.column_names else pa.nulls(table.num_rows)
        try:
            columns.append(found if found.type.equals(column.type) else found.cast(column.type))
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"the column {column.name} is {column.type} in the output, which does not hold all of its values: "
                f"{error}; leave it out with --keep-columns"
            ) from None
    return pa.Table.from_arrays(columns, schema=schema)


# Rows of Parquet files, by their numbers.

_BUFFER_BYTES = 1024 * 1024


def _survey_parquet(file: InputFile, job: BulkJob) -> tuple[Any, list[Fragment]]:
    try:
        with opened(file) as source:
            parquet = need("pyarrow.parquet").ParquetFile(source)
            groups = [parquet.metadata.row_group(index).num_rows for index in range(parquet.num_row_groups)]
    except InputDamaged as damage:
        return need("pyarrow").schema([]), [Fragment(file, 0, 0, 0, f"not a complete Parquet file: {damage}")]
    return parquet.schema_arrow, list(cut_parquet(file, groups, job.rows_per_fragment))


def _read_parquet(fragment: Fragment, job: BulkJob) -> Iterator[Chunk]:
    """What cannot be decoded is one rejection for all rows that are left."""
    position = fragment.start
    try:
        with opened(fragment.file) as source:
            # A buffer makes it read pages one after another; without one, all of a row group is in memory.
            file = need("pyarrow.parquet").ParquetFile(
                source, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
            )
            for table in _tables(file, fragment, job):
                yield _parquet_chunk(table, position, job)
                position += table.num_rows
            if position < fragment.stop:
                raise ValueError("it has fewer rows than its footer says")
    except InputDamaged as damage:
        reason = f"the file is damaged: {damage}"
        yield Chunk(None, [], [], [], [Rejection(position, reason, count=fragment.stop - position)])


def _tables(file: Any, fragment: Fragment, job: BulkJob) -> Iterator[Any]:
    """The rows of the fragment, at most a chunk at a time by the mean size of rows."""
    pa = need("pyarrow")
    groups: list[int] = []
    skip = start = 0
    largest = 1
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        if start < fragment.stop and fragment.start < start + group.num_rows:
            skip = skip if groups else fragment.start - start
            groups.append(index)
            largest = max(largest, group.total_byte_size // group.num_rows)
        start += group.num_rows
    rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // largest))
    needed = [job.column] if job.id_column is None else [job.column, job.id_column]
    columns = None if job.keep is None else [*dict.fromkeys([*job.keep, *needed])]
    # Dictionaries in lists and structs: Arrow makes no batch of them that spans row groups.
    inside = any(column.type.num_fields and "dictionary<" in str(column.type) for column in file.schema_arrow)
    left = fragment.stop - fragment.start
    for some in [[group] for group in groups] if inside else [groups]:
        for batch in file.iter_batches(rows, row_groups=some, columns=columns, use_threads=False):
            table = pa.Table.from_batches([batch]).slice(skip, left)
            skip = max(0, skip - batch.num_rows)
            left -= table.num_rows
            if table.num_rows:
                yield table
            if not left:
                return


def _parquet_chunk(table: Any, position: int, job: BulkJob) -> Chunk:
    if job.column not in table.column_names:
        reason = f"there is no column {job.column}"
        return Chunk(None, [], [], [], [Rejection(position, reason, count=table.num_rows)])
    rows = list(range(position, position + table.num_rows))
    inputs = _values(table.column(job.column))
    has_ids = job.id_column is not None and job.id_column in table.column_names
    ids = _values(table.column(job.id_column)) if has_ids else [None] * len(rows)
    if job.keep is not None:
        table = table.select([name for name in job.keep if name in table.column_names])
    return Chunk(table, rows, inputs, ids, [])


def _values(column: Any) -> list[Any]:
    """The values of a column; bytes where a string is not UTF-8.

    Old writers, and Spark on demand, store text as bytes without saying so.
    """
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(need("pyarrow").large_binary()).to_pylist()
    for place, value in enumerate(values):
        if isinstance(value, bytes):
            try:
                values[place] = value.decode()
            except UnicodeDecodeError:
                continue
    return values


# Rows of JSON lines: objects, or plain strings, which are taken for the input itself, as lines of text files are.
#
# A column of nested values, or of several types, is JSON text.

LONGEST_LINE = 16 * 1024 * 1024
_BLOCK = 1024 * 1024
# Of a stream that ends early, what comes before the block in which it does is kept.
_SMALL_BLOCK = 16 * 1024
_INT64 = range(-(2**63), 2**63)
# A float holds these exactly.
_EXACT = range(-(2**53), 2**53 + 1)
Row = dict[Any, Any]


def _survey_lines(file: InputFile, job: BulkJob) -> tuple[dict[str, str], list[Fragment]]:
    """The types of all columns by name, without those of rejected rows, and the fragments."""
    types: dict[str, str] = {}
    fragments: list[Fragment] = []
    begin = rows = 0
    for offset, row in _rows(Fragment(file, 0, file.size, 0), job):
        if rows == job.rows_per_fragment and not file.compression:
            fragments.append(Fragment(file, begin, offset, rows))
            begin, rows = offset, 0
        rows += 1
        if not isinstance(row, Rejection):
            kept = not job.problem(row.get(job.column))
            for name, value in row.items():
                types[name] = _wider(types.get(name, "null"), _type(value) if kept else "null")
    return types, [*fragments, Fragment(file, begin, file.size, rows)]


def _read_lines(fragment: Fragment, job: BulkJob) -> Iterator[Chunk]:
    types = job.json_types
    if job.keep is not None:
        types = {name: types.get(name, "null") for name in job.keep}
    found: list[tuple[int, Row]] = []
    rejected: list[Rejection] = []
    begin = None
    for offset, row in _rows(fragment, job):
        # Before this row, as it may be a long one.
        begin = offset if begin is None else begin
        if len(found) + len(rejected) >= CHUNK_ROWS or offset - begin >= CHUNK_BYTES:
            yield _lines_chunk(found, rejected, types, job)
            found, rejected, begin = [], [], offset
        if isinstance(row, Rejection):
            rejected.append(row)
        elif problem := job.problem(row.get(job.column)):
            # Not in the table, whose types follow the other rows.
            rejected.append(Rejection(offset, problem, row.get(job.id_column)))
        else:
            found.append((offset, row))
    if found or rejected:
        yield _lines_chunk(found, rejected, types, job)


def _rows(fragment: Fragment, job: BulkJob) -> Iterator[tuple[int, Row | Rejection]]:
    """Each row with the offset of its line. The last is the rejection of a damaged rest."""
    packed = bool(fragment.file.compression)
    offset = fragment.start
    try:
        with opened(fragment.file) as source:
            stream: Any = source
            if packed:
                pa = need("pyarrow")
                stream = pa.CompressedInputStream(pa.PythonFile(source, "r"), fragment.file.compression)
            with io.BufferedReader(stream, _SMALL_BLOCK if packed else _BLOCK) as reader:
                if offset:
                    reader.seek(offset)
                while packed or offset < fragment.stop:
                    length, line = _next_line(reader)
                    if not length:
                        return
                    if fragment.file.form == "txt" or line is None or line.strip():
                        yield offset, _row(offset, line, job, is_text=fragment.file.form == "txt")
                    offset += length
    except InputDamaged as damage:
        yield offset, Rejection(offset, f"the file is damaged or ends early: {damage}", rest=True)


def _next_line(reader: Any) -> tuple[int, bytes | None]:
    """The length of the next line, 0 at the end, and the line without its end unless it is too long."""
    line = reader.readline(LONGEST_LINE + 1)
    length = len(line)
    if line.endswith(b"\n") or length <= LONGEST_LINE:
        return length, line.removesuffix(b"\n")
    while not line.endswith(b"\n") and (line := reader.readline(_BLOCK)):
        length += len(line)
    return length, None


def _row(offset: int, line: bytes | None, job: BulkJob, *, is_text: bool) -> Row | Rejection:
    """An object of JSON, or a line of text, also an empty one, so that rows are counted as lines."""
    if line is None:
        return Rejection(offset, f"the line is longer than {LONGEST_LINE} bytes")
    try:
        if is_text:
            return {job.column: line.removesuffix(b"\r").decode()}
        value = json.loads((line if offset else line.removeprefix(codecs.BOM_UTF8)).decode())
    except (ValueError, RecursionError) as error:
        return Rejection(offset, "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON")
    if isinstance(value, str):
        value = {job.column: value}
    if not isinstance(value, dict):
        return Rejection(offset, "neither an object nor a string")
    # A surrogate can stand only where JSON has an escape.
    if b"\\u" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Rejection(offset, "a lone surrogate, which is not valid Unicode", value.get(job.id_column))
    return value


_KINDS = {type(None): "null", bool: "bool", float: "float", str: "str"}


def _type(value: Any) -> str:
    if type(value) is not int:
        return _KINDS.get(type(value), "json")
    if value in _EXACT:
        return "int"
    return "long" if value in _INT64 else "json"


def _wider(one: str, other: str) -> str:
    """The type of a column with values of both."""
    if other in {one, "null"}:
        return one
    if one == "null":
        return other
    if {one, other} == {"int", "long"}:
        return "long"
    return "float" if {one, other} == {"int", "float"} else "json"


def _json_schema(types: Mapping[str, str]) -> Any:
    pa = need("pyarrow")
    known = {"null": pa.null(), "bool": pa.bool_(), "int": pa.int64(), "long": pa.int64(), "float": pa.float64()}
    return pa.schema([(name, known.get(kind, pa.string())) for name, kind in types.items()])


def _lines_chunk(found: list[tuple[int, Row]], rejected: list[Rejection], types: dict[str, str], job: BulkJob) -> Chunk:
    pa = need("pyarrow")
    fields = _json_schema(types)
    arrays = []
    for column in fields:
        kind, values = types[column.name], [row.get(column.name) for _, row in found]
        if kind == "json":
            values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
        elif kind == "float":
            values = [None if value is None else float(value) for value in values]
        arrays.append(pa.array(values, column.type))
    inputs = [row.get(job.column) for _, row in found]
    ids = [row.get(job.id_column) for _, row in found]
    return Chunk(pa.Table.from_arrays(arrays, schema=fields), [offset for offset, _ in found], inputs, ids, rejected)
