"""The input's columns in the output of a job: found once for the whole input, so that all its files have one schema."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backend_client._resilience.threads import map_in_daemon_threads
from backend_client.bulk.fragments import InputFile
from backend_client.bulk.job import BulkJob
from backend_client.bulk.optional import need
from backend_client.bulk.readers import columns_in, json_lines
from backend_client.bulk.readers.source import InputChanged
from backend_client.errors import ConfigurationError

_FILES_AT_ONCE = 16


def with_columns(job: BulkJob, files: Sequence[InputFile]) -> BulkJob:
    """The job with its columns: reads all JSON lines, the headers of CSV and the footers of Parquet. Blocking.

    Raises OSError when a store fails, ConfigurationError for files that changed or columns that one type cannot hold.
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
    merged: dict[str, tuple[Any, InputFile]] = {}
    metadata = None
    for file, each in zip(files, found, strict=True):
        schema = json_lines.schema({name: types[name] for name in each}) if isinstance(each, dict) else each
        metadata = metadata or schema.metadata
        for column in schema:
            if job.keep is None or column.name in job.keep:
                merged[column.name] = _merged(merged.get(column.name), column.with_nullable(True), file)
    columns = {name: column for name, (column, _) in merged.items()}
    if job.keep is not None:
        columns = {name: columns.get(name, pa.field(name, pa.null())) for name in job.keep}
    encoded = base64.b64encode(pa.schema(list(columns.values()), metadata).serialize().to_pybytes()).decode()
    return replace(job, schema=encoded, json_types=types)


def _merged(known: tuple[Any, InputFile] | None, column: Any, file: InputFile) -> tuple[Any, InputFile]:
    """A column that holds the values of both, and the first file that has it. Text holds every simple type."""
    pa = need("pyarrow")
    if known is None:
        return column, file
    first, where = known
    try:
        schemas = [pa.schema([first]), pa.schema([column])]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0), where
    except (pa.ArrowException, ValueError, TypeError):
        if _is_simple(first.type) and _is_simple(column.type):
            return pa.field(column.name, pa.string()), where
    raise ConfigurationError(
        f"the column {column.name} is {first.type} in {where.url} and {column.type} in {file.url}, and all files of an "
        "output have one schema: convert one of them, leave the column out with --keep-columns, or run two jobs"
    )


def _is_simple(kind: Any) -> bool:
    pa = need("pyarrow")
    try:
        pa.nulls(0, kind).cast(pa.string())
    except (pa.ArrowException, NotImplementedError):
        return False
    return True


def schema_of(job: BulkJob) -> Any:
    """The Arrow schema of the input's columns in every file of the output."""
    pa = need("pyarrow")
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(job.schema)))


def conform(table: Any, schema: Any) -> Any:
    """The table with the columns of the schema: missing ones are null. Raises pyarrow.ArrowInvalid for lossy casts."""
    pa = need("pyarrow")
    present = set(table.column_names)
    columns = [
        table.column(column.name).cast(column.type) if column.name in present else pa.nulls(table.num_rows, column.type)
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
