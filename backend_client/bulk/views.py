"""Strings in place of Arrow's string views, which it can write and read, but of which it cannot pick rows."""

from __future__ import annotations

from typing import Any

from backend_client.bulk.optional import need


def without_views(schema: Any) -> Any:
    """The Arrow schema, with the same strings and bytes in types that all of Arrow's functions know."""
    pa = need("pyarrow")
    return pa.schema([field.with_type(_plain(field.type)) for field in schema], schema.metadata)


def _plain(kind: Any) -> Any:
    pa = need("pyarrow")
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.string() if pa.types.is_string_view(kind) else pa.binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    return kind
