"""Whether a schema is written as the standard says, and what can be told from its shape alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from worker_node.errors import BadRequest
from worker_node.grammars.formats import FORMATS, REFUSED
from worker_node.grammars.merging_objects import OBJECT_KEYWORDS, Schema


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value == int(value) and value >= 0


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


_JSON_TYPES: dict[Any, str] = {str: "string", list: "array", dict: "object"}

KEYWORDS_OF: dict[str, frozenset[str]] = {
    "object": OBJECT_KEYWORDS,
    "array": frozenset(
        {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"}
    ),
    "string": frozenset({"minLength", "maxLength", "pattern", "format", "not"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"}),
    "boolean": frozenset(),
    "null": frozenset(),
}

COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCHEMAS = (
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "unevaluatedItems",
    "additionalItems",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def _is_properties(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(COUNTS, (_is_count, "a count")),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    **dict.fromkeys(("$ref", "format"), (TYPES["string"], "a string")),
    # Several patterns that have to match at once are a tuple, which no request holds.
    "pattern": (lambda value: isinstance(value, str | tuple), "a string"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
        "lists of names",
    ),
    "dependencies": (
        lambda value: isinstance(value, dict) and all(_is_names(part) or _is_schema(part) for part in value.values()),
        "lists of names or schemas",
    ),
    **dict.fromkeys(_LISTS, (_is_schemas, "a list of schemas")),
    **dict.fromkeys(_SCHEMAS, (_is_schema, "a schema")),
    "uniqueItems": (TYPES["boolean"], "a boolean"),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), (_is_properties, "an object of schemas")),
    "required": (_is_names, "a list of names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "type": (_is_type, f"one or more of {', '.join(TYPES)}"),
}


def kind_of(value: Any) -> str:
    """The type of a JSON value, "number" for whole numbers too."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    return _JSON_TYPES.get(type(value), "number")


def check_shape(schema: Any, path: str) -> None:
    """Raise BadRequest, naming the part, unless each keyword holds what the standard says."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{path}: a schema is an object or a boolean", param=path)
    for keyword, value in schema.items():
        if keyword in _SHAPES:
            holds, what = _SHAPES[keyword]
            if not holds(value):
                raise BadRequest(f"{path}.{keyword}: should be {what}", param=f"{path}.{keyword}")


def type_of(schema: Schema) -> list[str]:
    """The types that a schema names, or to which its keywords belong; none if it says nothing of a type."""
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else list(dict.fromkeys(schema["type"]))
        return [name for name in names if not (name == "integer" and "number" in names)]
    return [
        kind
        for kind, own in KEYWORDS_OF.items()
        if kind != "integer"
        and (any(key in own - {"format", "not"} for key in schema) or (kind == "string" and _is_text(schema)))
    ]


def _is_text(schema: Schema) -> bool:
    """Whether the format is one of strings; others, like int32, say nothing of the type."""
    return schema.get("format") in FORMATS or schema.get("format") in REFUSED


def with_type(schema: Schema) -> Schema:
    """The schema with the types that values written for it have."""
    kinds = type_of(schema)
    return {"type": kinds} | schema if kinds and "enum" not in schema else schema
