"""Keywords that stand beside `anyOf`, `allOf` or `$ref` and count as well: two schemas as one."""

from __future__ import annotations

from typing import Any

# They say something about a schema and nothing about a value.
ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "$defs",
        "contentEncoding",
        "contentMediaType",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "nullable",
        "readOnly",
        "strict",
        "title",
        "writeOnly",
    }
)
_LARGER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})

Schema = dict[str, Any]


class CannotMerge(ValueError):
    """Both schemas have the keyword, and one keyword cannot say both."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


def merge(one: Schema, other: Schema) -> Schema:
    """Return a schema that admits only what both admit. Raises CannotMerge."""
    merged = dict(one)
    for keyword, value in other.items():
        merged[keyword] = value if keyword not in merged else _both(keyword, merged[keyword], value)
    return merged


def _both(keyword: str, one: Any, other: Any) -> Any:
    if one == other or keyword in ANNOTATIONS:
        return one
    if keyword in _LARGER | _SMALLER:
        return max(one, other) if keyword in _LARGER else min(one, other)
    if keyword == "required":
        return [*one, *(name for name in other if name not in one)]
    if keyword == "properties":
        return {
            name: one[name]
            if name not in other
            else other[name]
            if name not in one
            else {"allOf": [one[name], other[name]]}
            for name in [*one, *(name for name in other if name not in one)]
        }
    if keyword == "type":
        first, second = ([value] if isinstance(value, str) else value for value in (one, other))
        if common := [name for name in first if name in second or (name == "integer" and "number" in second)]:
            return common
    if keyword == "enum" and (common := [value for value in one if value in other]):
        return common
    raise CannotMerge(keyword)
