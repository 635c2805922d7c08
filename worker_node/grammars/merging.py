"""Keywords that stand beside `anyOf`, `allOf` or `$ref` and count as well: two schemas as one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from worker_node.grammars.budget import Budget
from worker_node.grammars.merging_objects import OBJECT_KEYWORDS, CannotMerge, MergedObjects, Schema, both_parts

# They say something about a schema and nothing about a value.
ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "$anchor",
        "$defs",
        "$dynamicAnchor",
        "$vocabulary",
        "contentSchema",
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
_LARGER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems"})
_SMALLER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems"})


class Contradiction(ValueError):
    """No value matches both schemas."""


class Merged:
    """Schemas that all hold for one value, gathered into one schema; the time is linear in what is added.

    They hold no keyword that combines schemas, no reference and no `const`.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._keywords: Schema = {}
        self._objects = MergedObjects(budget)

    def add(self, schema: Schema) -> None:
        """Have this schema hold too. Raises CannotMerge, Contradiction, or OutOfSteps beyond the budget."""
        self._objects.add(schema)
        self._add_group(schema, _LIST, self._lists)
        self._add_group(schema, _CONTAINS, self._same)
        for keyword, value in schema.items():
            self._budget.spend(_size(value))
            if keyword in OBJECT_KEYWORDS or keyword in _LIST or keyword in _CONTAINS:
                continue
            if keyword not in self._keywords:
                self._keywords[keyword] = value
            elif keyword not in ANNOTATIONS:
                self._keywords[keyword] = self._both(keyword, self._keywords[keyword], value)

    def schema(self) -> Schema:
        """The one schema."""
        return self._keywords | self._objects.schema()

    def _add_group(self, schema: Schema, keywords: tuple[str, ...], merge: Callable[[Schema, Schema], Schema]) -> None:
        """Merge keywords that mean something together only."""
        ours = {keyword: self._keywords[keyword] for keyword in keywords if keyword in self._keywords}
        theirs = {keyword: schema[keyword] for keyword in keywords if keyword in schema}
        self._budget.spend(sum(map(_size, theirs.values())))
        self._keywords |= merge(ours, theirs) if ours and theirs else theirs

    def _same(self, ours: Schema, theirs: Schema) -> Schema:
        if not self._equal(ours, theirs):
            raise CannotMerge("contains")
        return ours

    def _lists(self, ours: Schema, theirs: Schema) -> Schema:
        """Item by item."""
        first, second = ours.get("prefixItems", []), theirs.get("prefixItems", [])
        self._budget.spend(len(first) + len(second))
        longest = max(len(first), len(second))
        parts = [
            both_parts(
                one[i] if i < len(one) else group.get("items", True) for group, one in ((ours, first), (theirs, second))
            )
            for i in range(longest)
        ]
        merged = {"prefixItems": parts} if longest else {}
        if "items" in ours or "items" in theirs:
            merged["items"] = both_parts([ours.get("items", True), theirs.get("items", True)])
        return merged

    def _both(self, keyword: str, one: Any, other: Any) -> Any:
        if keyword in _LARGER | _SMALLER:
            return max(one, other) if keyword in _LARGER else min(one, other)
        if keyword in _JOINED:
            if keyword in {"pattern", "not"}:  # they grow
                self._budget.spend(_size(one))
            return _JOINED[keyword](one, other)
        if one is other or self._equal(one, other):
            return one
        raise CannotMerge(keyword)

    def _equal(self, one: Any, other: Any) -> bool:
        text = comparable(one)
        # Through references a small schema may have large parts compared again and again.
        self._budget.spend(len(text) // 8)
        return text == comparable(other)


def _types(one: Any, other: Any) -> list[str]:
    first, second = ([value] if isinstance(value, str) else value for value in (one, other))
    common = [name for name in first if name in second or (name == "integer" and "number" in second)]
    common += ["integer"] * ("integer" in second and "number" in first and "integer" not in common)
    if not common:
        raise Contradiction("type")
    return common


def _constants(one: list[Any], other: list[Any]) -> list[Any]:
    allowed = {comparable(value) for value in other}
    common = [value for value in one if comparable(value) in allowed]
    if not common:
        raise Contradiction("enum")
    return common


def _multiples(one: float, other: float) -> float:
    if one != int(one) or other != int(other):
        if one == other:
            return one
        raise CannotMerge("multipleOf")
    return math.lcm(int(one), int(other))


def _patterns(one: Any, other: Any) -> tuple[str, ...]:
    # A tuple, which no request holds: a string that has to match all of them.
    return tuple(
        dict.fromkeys((one,) if isinstance(one, str) else one)
        | dict.fromkeys((other,) if isinstance(other, str) else other)
    )


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _constants,
    "multipleOf": _multiples,
    "pattern": _patterns,
    # Only ever the exclusion of some strings: what else is negated is expanded before.
    "not": lambda one, other: {"enum": [*one["enum"], *other["enum"]]},
    "uniqueItems": lambda one, other: one or other,
}
_LIST = ("prefixItems", "items")
_CONTAINS = ("contains", "minContains", "maxContains")


def _size(value: Any) -> int:
    return 1 + (len(value) if isinstance(value, list | dict) else 0)


def comparable(value: Any) -> str:
    """A text that is the same for equal JSON values and no others: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{comparable(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(comparable, value)) + "]"
    return json.dumps(value)
