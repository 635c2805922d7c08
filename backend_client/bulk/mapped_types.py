"""Arrow types with other leaves: the same values in types that all of Arrow's functions treat well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend_client.bulk.optional import need


def without_views(schema: Any) -> Any:
    """The schema without string views, which Arrow can write and read, but of which it cannot pick rows."""
    pa = need("pyarrow")

    def plain(leaf: Any) -> Any:
        if pa.types.is_string_view(leaf):
            return pa.string()
        return pa.binary() if pa.types.is_binary_view(leaf) else leaf

    return pa.schema([field.with_type(_mapped(field.type, plain)) for field in schema], schema.metadata)


def in_utc(kind: Any) -> Any:
    """The type with moments in UTC: in text, other zones lose the seconds of old offsets such as +00:53:28."""
    pa = need("pyarrow")

    def moment(leaf: Any) -> Any:
        return pa.timestamp(leaf.unit, "UTC") if pa.types.is_timestamp(leaf) and leaf.tz is not None else leaf

    return _mapped(kind, moment)


def _mapped(kind: Any, leaf: Callable[[Any], Any]) -> Any:
    pa = need("pyarrow")
    types = pa.types

    def element() -> Any:
        return kind.value_field.with_type(_mapped(kind.value_type, leaf))

    made: tuple[tuple[Callable[[Any], bool], Callable[[], Any]], ...] = (
        (types.is_list, lambda: pa.list_(element())),
        (types.is_large_list, lambda: pa.large_list(element())),
        (types.is_fixed_size_list, lambda: pa.list_(element(), kind.list_size)),
        (types.is_map, lambda: pa.map_(_mapped(kind.key_type, leaf), _mapped(kind.item_type, leaf), kind.keys_sorted)),
        (types.is_struct, lambda: pa.struct([field.with_type(_mapped(field.type, leaf)) for field in kind])),
    )
    return next((make() for test, make in made if test(kind)), None) or leaf(kind)
