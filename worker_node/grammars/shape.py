"""Whether a schema is written as the standard says, and what can be told from its shape alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker_node.errors import BadRequest
from worker_node.grammars.merging import comparable

Schema = dict[str, Any]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | dict)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCHEMAS = ("additionalProperties", "unevaluatedProperties", "items", "unevaluatedItems", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def _is_properties(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (_is_count, "a count")),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    **dict.fromkeys(("$ref", "pattern", "format"), (TYPES["string"], "a string")),
    **dict.fromkeys(_LISTS, (_is_schemas, "a list of schemas")),
    **dict.fromkeys(_SCHEMAS, (_is_schema, "a schema")),
    "uniqueItems": (TYPES["boolean"], "a boolean"),
    "properties": (_is_properties, "an object of schemas"),
    "required": (_is_names, "a list of names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "type": (_is_type, f"one or more of {', '.join(TYPES)}"),
}


def check_shape(schema: Any, path: str) -> None:
    """Raise BadRequest, naming the part, unless each keyword holds what the standard says."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{path}: a schema is an object or a boolean", param=path)
    for keyword, value in schema.items():
        if keyword in _SHAPES:
            holds, what = _SHAPES[keyword]
            if not holds(value):
                raise BadRequest(f"{path}.{keyword}: should be {what}", param=f"{path}.{keyword}")


def type_of(schema: Schema, keywords: Mapping[str, frozenset[str]]) -> list[str]:
    """The types that a schema names, or to which its keywords belong; none if it says nothing of a type."""
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else list(dict.fromkeys(schema["type"]))
        return [name for name in names if not (name == "integer" and "number" in names)]
    return [
        kind for kind, own in keywords.items() if kind != "integer" and any(key in own - {"format"} for key in schema)
    ]


def disjoint(options: Sequence[Schema]) -> bool:
    """Whether no value can match two of the schemas: by type, or by a required property with its own constants."""
    kinds = [_broad_types(option) for option in options]
    if all(kinds) and _pairwise_disjoint(kinds):
        return True
    tags = [_tags(option) for option in options]
    shared = set.intersection(*(set(tag) for tag in tags)) if tags else set()
    return any(_pairwise_disjoint([tag[name] for tag in tags]) for name in shared)


def told_apart_at_once(options: Sequence[Schema]) -> bool:
    """Whether the first property of each option is the same and required, and its constants tell the options apart."""
    firsts = {next(iter(option.get("properties") or ()), None) for option in options}
    if len(firsts) != 1 or (first := firsts.pop()) is None:
        return False
    tags = [_tags(option).get(first) for option in options]
    return _pairwise_disjoint([tag for tag in tags if tag is not None]) and None not in tags


def _pairwise_disjoint(sets: Sequence[set[str]]) -> bool:
    return sum(map(len, sets)) == len(set().union(*sets))


def _broad_types(option: Schema) -> set[str]:
    named = option.get("type", [])
    return {"number" if name == "integer" else name for name in ([named] if isinstance(named, str) else named)}


def _tags(option: Schema) -> dict[str, set[str]]:
    """The constants of each required property, in a form that can be compared."""
    tags: dict[str, set[str]] = {}
    properties = option.get("properties", {})
    for name in option.get("required", []):
        part = properties.get(name)
        if isinstance(part, dict) and ("const" in part or "enum" in part):
            tags[name] = {comparable(value) for value in ([part["const"]] if "const" in part else part["enum"])}
    return tags
