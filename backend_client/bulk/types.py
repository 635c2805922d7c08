"""The type of a column in the output, where the files of the input have several: it holds every value of each exactly.

A number is never rounded and no cast may fail once rows are served, so a type is chosen only if all values of all
types fit into it, or if statistics prove that those of this input do."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend_client.bulk.optional import need

Bounds = tuple[int, int]
"""The least and the largest integer of a column, or of its ticks."""

# The integers that each float holds without a gap.
_EXACT_IN_FLOAT = {16: 2**11, 32: 2**24, 64: 2**53}
_UNITS = ("s", "ms", "us", "ns")
# Arrow writes dates up to the year 32767, and before 1970 as far.
_DAYS_IN_TEXT = 10_900_000
_DIGITS, _MANY_DIGITS = 38, 76


class NoCommonType(Exception):
    """No type holds the values of all."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An Arrow type with what is known of its integers; `parts` are those of elements, fields, or key and item."""

    type: Any
    bounds: Bounds | None = None
    parts: tuple[Kind, ...] = ()


def kind_of(type_: Any, leaves: Iterator[Bounds | None]) -> Kind:
    """The kind of a type, with the bounds of its leaves, in Parquet's order."""
    if parts := _parts(type_):
        return Kind(type_, None, tuple(kind_of(part, leaves) for part in parts))
    return Kind(type_, next(leaves, None))


def leaves_of(type_: Any) -> list[Any]:
    """The leaves of a type, in Parquet's order."""
    parts = _parts(type_)
    return [leaf for part in parts for leaf in leaves_of(part)] if parts else [type_]


def merged(one: Kind, other: Kind) -> Kind:
    """One kind for the values of two of the same type."""
    bounds = None
    if one.bounds is not None and other.bounds is not None:
        bounds = min(one.bounds[0], other.bounds[0]), max(one.bounds[1], other.bounds[1])
    return Kind(one.type, bounds, tuple(merged(*pair) for pair in zip(one.parts, other.parts, strict=True)))


def common_type(kinds: Sequence[Kind]) -> Any:
    """The narrowest type that holds the values of all kinds exactly; otherwise text. Depends on no order.

    Raises NoCommonType where text does not hold them either: for bytes and nested values beside others.
    """
    pa = need("pyarrow")
    some = [kind for kind in kinds if not pa.types.is_null(kind.type)]
    if _same(some):
        return some[0].type if some else pa.null()
    plain = [_plain(kind) for kind in some]
    if _same(plain):
        return plain[0].type
    types = [kind.type for kind in plain]
    for family in (_numbers, _bytes, _times, _lists, _structs, _maps):
        found = family(plain)
        if found is not None:
            return found
    if all(map(is_text_like, plain)):
        return pa.large_string() if any(pa.types.is_large_string(each) for each in types) else pa.string()
    raise NoCommonType


def is_text_like(kind: Kind) -> bool:
    """Whether text holds every value of the kind, so that it can be read back."""
    types = need("pyarrow").types
    type_ = plain_type(kind.type)
    if types.is_timestamp(type_) or types.is_date(type_):
        day = (
            1
            if types.is_date32(type_)
            else 86400 * 1000 ** _UNITS.index("ms" if types.is_date64(type_) else type_.unit)
        )
        known = kind.bounds or (-(2**63), 2**63)
        return max(map(abs, known)) <= _DAYS_IN_TEXT * day
    tests = (types.is_null, types.is_boolean, types.is_string, types.is_large_string, types.is_time)
    return _is_number(type_) or any(test(type_) for test in tests)


def plain_type(type_: Any) -> Any:
    """The type of the values of a dictionary, and of the storage of an extension; otherwise the type itself."""
    pa = need("pyarrow")
    if pa.types.is_dictionary(type_):
        return type_.value_type
    return type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_


def is_nested_dictionary(type_: Any) -> bool:
    """Whether there is a dictionary inside it."""
    return bool(_parts(type_)) and any(map(need("pyarrow").types.is_dictionary, leaves_of(type_)))


def _plain(kind: Kind) -> Kind:
    return Kind(plain_type(kind.type), kind.bounds, kind.parts)


def _same(kinds: Sequence[Kind]) -> bool:
    return all(kind.type.equals(kinds[0].type) for kind in kinds)


def _parts(type_: Any) -> list[Any]:
    types = need("pyarrow").types
    if _is_list(type_):
        return [type_.value_type]
    if types.is_struct(type_):
        return [field.type for field in type_]
    return [type_.key_type, type_.item_type] if types.is_map(type_) else []


def _is_list(type_: Any) -> bool:
    types = need("pyarrow").types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(type_) for test in tests)


def _is_number(type_: Any) -> bool:
    types = need("pyarrow").types
    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_))


def _limits(type_: Any) -> Bounds:
    if need("pyarrow").types.is_signed_integer(type_):
        return -(2 ** (type_.bit_width - 1)), 2 ** (type_.bit_width - 1) - 1
    return 0, 2**type_.bit_width - 1


def _numbers(kinds: Sequence[Kind]) -> Any:
    types = need("pyarrow").types
    if not all(_is_number(kind.type) for kind in kinds):
        return None
    integers = [kind for kind in kinds if types.is_integer(kind.type)]
    floats = [kind.type for kind in kinds if types.is_floating(kind.type)]
    decimals = [kind.type for kind in kinds if types.is_decimal(kind.type)]
    if floats:
        # A double is no sum of powers of ten that a decimal of any width holds, nor the other way about.
        return None if decimals else _float(integers, floats)
    return _decimal(integers, decimals) if decimals else _integer(integers)


def _float(integers: Sequence[Kind], floats: Sequence[Any]) -> Any:
    pa = need("pyarrow")
    least = max(each.bit_width for each in floats)
    largest = max((max(map(abs, _limits(kind.type))) for kind in integers), default=0)
    for width, made in ((16, pa.float16()), (32, pa.float32()), (64, pa.float64())):
        if width >= least and largest <= _EXACT_IN_FLOAT[width]:
            return made
    known = max(max(map(abs, kind.bounds or _limits(kind.type))) for kind in integers)
    return pa.float64() if known <= _EXACT_IN_FLOAT[64] else None


def _decimal(integers: Sequence[Kind], decimals: Sequence[Any]) -> Any:
    pa = need("pyarrow")
    scale = max(0, *(each.scale for each in decimals))
    whole = [each.precision - each.scale for each in decimals]
    whole += [max(len(str(abs(limit))) for limit in _limits(kind.type)) for kind in integers]
    digits = max(whole) + scale
    if digits <= _DIGITS:
        return pa.decimal128(digits, scale)
    # Few programs read such wide decimals: only where the input has them.
    wide = any(pa.types.is_decimal256(each) for each in decimals)
    return pa.decimal256(digits, scale) if wide and digits <= _MANY_DIGITS else None


def _integer(integers: Sequence[Kind]) -> Any:
    pa = need("pyarrow")
    low, high = _hull([_limits(kind.type) for kind in integers])
    signed = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
    unsigned = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
    for made in signed if low < 0 else unsigned:
        if _within((low, high), made):
            return made
    known = _hull([kind.bounds or _limits(kind.type) for kind in integers])
    fitting = [made for made in (pa.int64(), pa.uint64()) if _within(known, made)]
    return fitting[0] if fitting else pa.decimal128(20, 0)


def _hull(bounds: Sequence[Bounds]) -> Bounds:
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def _within(bounds: Bounds, type_: Any) -> bool:
    low, high = _limits(type_)
    return low <= bounds[0] and bounds[1] <= high


def _bytes(kinds: Sequence[Kind]) -> Any:
    """Text beside bytes is bytes, in UTF-8: a type that holds both."""
    pa = need("pyarrow")
    types = [kind.type for kind in kinds]
    texts = [each for each in types if pa.types.is_string(each) or pa.types.is_large_string(each)]
    fixed = [each for each in types if pa.types.is_fixed_size_binary(each)]
    other = [each for each in types if pa.types.is_binary(each) or pa.types.is_large_binary(each)]
    if len(texts) + len(fixed) + len(other) < len(types):
        return None
    large = any(pa.types.is_large_string(each) or pa.types.is_large_binary(each) for each in types)
    if fixed or other:
        return pa.large_binary() if large else pa.binary()
    return pa.large_string() if large else pa.string()


def _times(kinds: Sequence[Kind]) -> Any:
    pa = need("pyarrow")
    types = [kind.type for kind in kinds]
    if all(map(pa.types.is_date, types)):
        return pa.date64()
    if all(map(pa.types.is_time, types)):
        unit = max((each.unit for each in types), key=_UNITS.index)
        return pa.time32(unit) if unit in {"s", "ms"} else pa.time64(unit)
    if all(map(pa.types.is_timestamp, types)):
        zones = {each.tz for each in types}
        # With a zone it is a moment, which is the same in UTC; without one, a time of day somewhere.
        zone = "UTC" if len(zones) > 1 else types[0].tz
        return None if None in zones and zone else _ticks(kinds, lambda unit: pa.timestamp(unit, zone))
    return _ticks(kinds, pa.duration) if all(map(pa.types.is_duration, types)) else None


def _ticks(kinds: Sequence[Kind], made: Callable[[str], Any]) -> Any:
    """In the finest unit, if those of all others are known to fit into 64 bits of it."""
    finest = max((kind.type.unit for kind in kinds), key=_UNITS.index)
    for kind in kinds:
        factor = 1000 ** (_UNITS.index(finest) - _UNITS.index(kind.type.unit))
        if factor > 1 and (kind.bounds is None or max(map(abs, kind.bounds)) * factor >= 2**63):
            return None
    return made(finest)


def _lists(kinds: Sequence[Kind]) -> Any:
    pa = need("pyarrow")
    types = [kind.type for kind in kinds]
    if not all(map(_is_list, types)):
        return None
    if any(pa.types.is_list_view(each) or pa.types.is_large_list_view(each) for each in types):
        # Arrow's cast of a view to a list makes arrays that are not valid.
        raise NoCommonType
    element = common_type([kind.parts[0] for kind in kinds])
    sizes = {each.list_size if pa.types.is_fixed_size_list(each) else None for each in types}
    size = sizes.pop()
    if size is not None and not sizes:
        return pa.list_(element, size)
    large = any(map(pa.types.is_large_list, types))
    return pa.large_list(element) if large else pa.list_(element)


def _structs(kinds: Sequence[Kind]) -> Any:
    """All fields of all; one that a value does not have is null."""
    pa = need("pyarrow")
    if not all(pa.types.is_struct(kind.type) for kind in kinds):
        return None
    found: dict[str, list[Kind]] = {}
    for kind in kinds:
        for field, part in zip(kind.type, kind.parts, strict=True):
            found.setdefault(field.name, []).append(part)
    return pa.struct([pa.field(name, common_type(parts)) for name, parts in found.items()])


def _maps(kinds: Sequence[Kind]) -> Any:
    pa = need("pyarrow")
    if not all(pa.types.is_map(kind.type) for kind in kinds):
        return None
    return pa.map_(common_type([kind.parts[0] for kind in kinds]), common_type([kind.parts[1] for kind in kinds]))


def duplicates(names: Sequence[str], types: Mapping[str, Any]) -> list[str]:
    """Names that are there twice, of columns or of fields in them (`column.field`)."""
    found = sorted({name for name in names if names.count(name) > 1})
    for name, type_ in types.items():
        found += [f"{name}.{inner}" for inner in _inner_duplicates(type_)]
    return found


def _inner_duplicates(type_: Any) -> list[str]:
    fields = {field.name: field.type for field in type_} if need("pyarrow").types.is_struct(type_) else {}
    if fields:
        return duplicates([field.name for field in type_], fields)
    return [name for part in _parts(type_) for name in _inner_duplicates(part)]


# Arrow types with other leaves: the same values in types that all of Arrow's functions treat well.


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


# Chunks in the columns of the output: each file's own types become those that were found for the whole input.

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
