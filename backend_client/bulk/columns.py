"""The input's columns in the output of a job: found once for the whole input, so that all its files have one schema."""

from __future__ import annotations

import base64
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backend_client.bulk.inputs import InputFile
from backend_client.bulk.job import BulkJob
from backend_client.bulk.optional import need
from backend_client.bulk.readers import columns_in, json_lines
from backend_client.bulk.readers.source import InputChanged
from backend_client.bulk.types import Kind, NoCommonType, common_type, duplicates, is_text_like, merged
from backend_client.errors import ConfigurationError
from backend_client.lifetime import map_in_daemon_threads

_FILES_AT_ONCE = 16
_NAMES_SHOWN = 20


@dataclass(slots=True)
class _Column:
    """A column of the input: its first field, and each type that it has with the first file that has it."""

    first: Any
    kinds: dict[Any, Kind] = field(default_factory=dict)
    files: dict[Any, InputFile] = field(default_factory=dict)

    def add(self, kind: Kind, file: InputFile) -> None:
        """Take in its kind in a file."""
        known = self.kinds.get(kind.type)
        self.kinds[kind.type] = kind if known is None else merged(known, kind)
        self.files.setdefault(kind.type, file)


def with_columns(job: BulkJob, files: Sequence[InputFile]) -> BulkJob:
    """The job with its columns: reads all JSON lines, the headers of CSV and the footers of Parquet. Blocking.

    Raises OSError when a store fails, ConfigurationError for files that changed, for columns that are there twice or
    not at all, that one type cannot hold, or that the output adds.
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
    columns: dict[str, _Column] = {}
    metadata = None
    for file, each in zip(files, found, strict=True):
        schema, kinds = json_lines.kinds({name: types[name] for name in each}) if isinstance(each, dict) else each
        _check_once(schema, file, job)
        metadata = metadata or schema.metadata
        for known, kind in zip(schema, kinds, strict=True):
            columns.setdefault(known.name, _Column(known)).add(kind, file)
    _check_there(list(columns), job)
    kept = {name: columns[name] for name in (job.keep or columns) if name in columns}
    check_columns(list(kept), job)
    fields = [_field(name, column, as_json=types.get(name) == "json") for name, column in kept.items()]
    if not columns:
        fields = [pa.field(name, pa.null()) for name in job.keep or ()]
    encoded = base64.b64encode(pa.schema(fields, metadata).serialize().to_pybytes()).decode()
    return replace(job, schema=encoded, json_types=types)


def _field(name: str, column: _Column, *, as_json: bool) -> Any:
    pa = need("pyarrow")
    kinds = list(column.kinds.values())
    try:
        made = _json_text(kinds) if as_json else common_type(kinds)
    except NoCommonType:
        pass
    else:
        return pa.field(name, made, metadata=column.first.metadata)
    one, other = _at_odds(kinds, as_json=as_json)
    raise ConfigurationError(
        f"the column {name} is {one} in {column.files[one].url} and {other} in {column.files[other].url}, and no type "
        "holds the values of both exactly: convert one of them, leave the column out with --keep-columns, or run two "
        "jobs"
    )


def _json_text(kinds: Sequence[Kind]) -> Any:
    """Text, which holds JSON of every simple value. Raises NoCommonType."""
    if all(map(is_text_like, kinds)):
        return need("pyarrow").string()
    raise NoCommonType


def _at_odds(kinds: Sequence[Kind], *, as_json: bool) -> tuple[Any, Any]:
    """Two types that no type holds both of, the first pair of all that have none."""
    for one, other in itertools.combinations(kinds, 2):
        try:
            _json_text([one, other]) if as_json else common_type([one, other])
        except NoCommonType:
            return one.type, other.type
    return kinds[0].type, kinds[-1].type


def _check_once(schema: Any, file: InputFile, job: BulkJob) -> None:
    """Raise ConfigurationError for names that are there twice, unless their columns are left out."""
    names = schema.names
    if job.keep is not None:
        names = [name for name in names if name in {*job.keep, job.column, job.id_column}]
    twice = duplicates(names, {name: schema.field(name).type for name in names if names.count(name) == 1})
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


def check_columns(names: list[str], job: BulkJob) -> None:
    """Raise ConfigurationError when the input has a column that the output adds."""
    taken = [name for name in job.added_columns if name in names]
    if taken:
        raise ConfigurationError(
            f"the input has columns that the output adds: {', '.join(taken)}; rename them, or choose the columns to "
            "keep with --keep-columns"
        )


def schema_of(job: BulkJob) -> Any:
    """The Arrow schema of the input's columns in every file of the output."""
    return _decoded(job.schema)


@functools.lru_cache(maxsize=8)
def _decoded(schema: str) -> Any:
    pa = need("pyarrow")
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(schema)))
