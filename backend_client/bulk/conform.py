"""Chunks in the columns of the output: each file's own types become those that were found for the whole input."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from backend_client.bulk.common_type import plain_type
from backend_client.bulk.mapped_types import in_utc
from backend_client.bulk.optional import need

_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def conform(table: Any, schema: Any, as_json: Collection[str] = ()) -> Any:
    """The table with the columns of the schema: missing ones are null, those of `as_json` JSON of their values.

    Raises pyarrow.ArrowInvalid for a value that its type cannot hold.
    """
    pa = need("pyarrow")
    present = set(table.column_names)
    columns = [
        pa.nulls(table.num_rows, column.type)
        if column.name not in present
        else json_of(table.column(column.name))
        if column.name in as_json
        else _cast(table.column(column.name), column.type)
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: Any, kind: Any) -> Any:
    if column.type.equals(kind):
        return column
    pa = need("pyarrow")
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    return column.cast(in_utc(column.type)).cast(kind)


def json_of(column: Any) -> Any:
    """JSON of each value as text: numbers and booleans as they are, all else as strings."""
    pa = need("pyarrow")
    kind = plain_type(column.type)
    texts = _cast(column, pa.string()).to_pylist()
    if pa.types.is_floating(kind):
        texts = [_NOT_FINITE.get(text, text) for text in texts]
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
        texts = [None if text is None else json.dumps(text, ensure_ascii=False) for text in texts]
    return pa.array(texts, pa.string())
