"""Keywords that stand beside `anyOf`, `allOf` or `$ref` and count as well: two schemas as one."""

from __future__ import annotations

import json
from typing import Any

from worker_node.grammars.budget import Budget

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


class Merged:
    """Schemas that all hold for one value, gathered into one schema; the time is linear in what is added."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._keywords: Schema = {}
        self._properties: dict[str, list[Any]] | None = None
        self._required: dict[str, None] | None = None

    def add(self, schema: Schema) -> None:
        """Have this schema hold too. Raises CannotMerge, or OutOfSteps beyond the budget."""
        for keyword, value in schema.items():
            self._budget.spend(_size(value))
            if keyword == "properties":
                self._properties = {} if self._properties is None else self._properties
                for name, part in value.items():
                    self._properties.setdefault(name, []).append(part)
            elif keyword == "required":
                self._required = {} if self._required is None else self._required
                self._required.update(dict.fromkeys(value))
            elif keyword not in self._keywords:
                self._keywords[keyword] = value
            elif keyword not in ANNOTATIONS:
                self._keywords[keyword] = self._both(keyword, self._keywords[keyword], value)

    def schema(self) -> Schema:
        """The one schema."""
        merged = dict(self._keywords)
        if self._properties is not None:
            merged["properties"] = {
                name: parts[0] if len(parts) == 1 else {"allOf": parts} for name, parts in self._properties.items()
            }
        if self._required is not None:
            merged["required"] = list(self._required)
        return merged

    def _both(self, keyword: str, one: Any, other: Any) -> Any:
        if keyword in _LARGER | _SMALLER:
            return max(one, other) if keyword in _LARGER else min(one, other)
        if keyword == "type":
            first, second = ([value] if isinstance(value, str) else value for value in (one, other))
            if common := [name for name in first if name in second or (name == "integer" and "number" in second)]:
                return common
        elif keyword == "enum":
            allowed = {comparable(value) for value in other}
            if common := [value for value in one if comparable(value) in allowed]:
                return common
        elif one is other or self._equal(one, other):
            return one
        raise CannotMerge(keyword)

    def _equal(self, one: Any, other: Any) -> bool:
        text = comparable(one)
        # Through references a small schema may have large parts compared again and again.
        self._budget.spend(len(text) // 8)
        return text == comparable(other)


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
