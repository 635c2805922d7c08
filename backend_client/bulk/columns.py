"""The input's columns in the output of a job: found once for the whole input, so that all its files have one schema."""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backend_client.bulk.inputs import InputChanged, InputFile
from backend_client.bulk.job import BulkJob
from backend_client.bulk.optional import need
from backend_client.bulk.readers import columns_in, json_lines
from backend_client.errors import ConfigurationError
from backend_client.lifetime import map_in_daemon_threads

_FILES_AT_ONCE = 16
_NAMES_SHOWN = 20
# In place of an Arrow type: a column of JSON lines whose values are nested or of several types.
_JSON_TEXT = "JSON text"


def with_columns(job: BulkJob, files: Sequence[InputFile]) -> BulkJob:
    """The job with its columns: reads all JSON lines and the footers of Parquet. Blocking.

    Raises OSError when a store fails, ConfigurationError for files that changed, for columns that are there twice or
    not at all, of different types, or that the output adds.
    """
    pa = need("pyarrow")
    try:
        # Lines may be read for minutes: an interrupted process must not wait for that, as it does for an executor.
        found = map_in_daemon_threads(lambda file: columns_in(file, job), files, _FILES_AT_ONCE, "columns")
    except InputChanged as error:
        raise ConfigurationError(str(error)) from None
    types: dict[str, str] = {}
    for each in found:
        if isinstance(each, dict):
            json_lines.merge(types, each)
    # Of each column, the types that it has with the first file that has each.
    columns: dict[str, dict[Any, InputFile]] = {}
    first: dict[str, Any] = {}
    metadata = None
    for file, each in zip(files, found, strict=True):
        is_json = isinstance(each, dict)
        schema = json_lines.schema({name: types[name] for name in each}) if is_json else each
        _check_once(schema.names, file, job)
        metadata = metadata or schema.metadata
        for column in schema:
            kind = _JSON_TEXT if is_json and types[column.name] == "json" else column.type
            columns.setdefault(column.name, {}).setdefault(kind, file)
            first.setdefault(column.name, column)
    _check_there(list(columns), job)
    kept = [name for name in (job.keep or columns) if name in columns]
    _check_free(kept, job)
    fields = [pa.field(name, _common_type(name, columns[name]), metadata=first[name].metadata) for name in kept]
    if not columns:
        fields = [pa.field(name, pa.null()) for name in job.keep or ()]
    encoded = base64.b64encode(pa.schema(fields, metadata).serialize().to_pybytes()).decode()
    return replace(job, schema=encoded, json_types=types)


def _common_type(name: str, files: dict[Any, InputFile]) -> Any:
    """The type of a column in the output. Raises ConfigurationError, with two files, for types that differ.

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
    """Raise ConfigurationError for names that are there twice, unless their columns are left out."""
    if job.keep is not None:
        names = [name for name in names if name in {*job.keep, job.column, job.id_column}]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"{file.url} has more than one column {twice[0]!r}: rename them, or choose others with --keep-columns"
        )


def _check_there(names: list[str], job: BulkJob) -> None:
    """Raise ConfigurationError for a column that is asked for and that no file has, where any could be read."""
    wanted = dict.fromkeys([job.column, *([job.id_column] if job.id_column is not None else []), *(job.keep or ())])
    missing = [name for name in wanted if name not in names]
    if names and missing:
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
        raise ConfigurationError(f"no file of the input has a column {missing[0]!r}; it has: {shown}")


def _check_free(names: list[str], job: BulkJob) -> None:
    """Raise ConfigurationError when the input has a column that the output adds."""
    taken = [name for name in job.added_columns if name in names]
    if taken:
        raise ConfigurationError(
            f"the input has columns that the output adds: {', '.join(taken)}; rename them, or choose the columns to "
            "keep with --keep-columns"
        )


@functools.lru_cache(maxsize=8)
def schema_of(encoded: str) -> Any:
    """The Arrow schema of the input's columns in every file of the output, from `BulkJob.schema`."""
    pa = need("pyarrow")
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))


def conform(table: Any, schema: Any) -> Any:
    """The table with the columns of the schema, those that it lacks null. Raises ConfigurationError for a value that
    its column cannot hold.
    """
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
