"""What several schemas say of the members of one object, as one schema."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from worker_node.grammars.budget import Budget
from worker_node.grammars.pattern import PatternRefused, pattern_to_terms
from worker_node.grammars.regular import Term, matches

OBJECT_KEYWORDS = frozenset(
    {
        "properties",
        "required",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    }
)
Schema = dict[str, Any]


class CannotMerge(ValueError):
    """Both schemas have the keyword, and one keyword cannot say both."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


def both_parts(parts: Iterable[Any]) -> Any:
    """One schema for all of these."""
    kept = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


class MergedObjects:
    """Each schema's `additionalProperties` is about the members that this schema itself does not name."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._properties: dict[str, list[Any]] | None = None
        self._patterns: dict[str, list[Any]] = {}
        self._others: Any = None
        self._names: list[Any] = []
        self._required: dict[str, None] | None = None
        self._least = 0
        self._most: int | None = None

    def add(self, schema: Schema) -> None:
        """Have this schema hold too. Raises CannotMerge, or OutOfSteps."""
        properties = schema.get("properties")
        patterns = schema.get("patternProperties", {})
        others = schema.get("additionalProperties")
        self._budget.spend(len(properties or ()) + len(patterns) + len(schema.get("required", ())))
        new = {name: [part] for name, part in (properties or {}).items()}
        if _says_something(self._others):
            _extend(new, set(self._properties or ()), self._patterns, self._others, patterns)
        if _says_something(others):
            self._budget.spend(len(self._properties or ()))
            self._properties = {} if self._properties is None else self._properties
            _extend(self._properties, set(properties or ()), patterns, others, self._patterns)
        if properties is not None:
            self._properties = {} if self._properties is None else self._properties
        for name, parts in new.items():
            assert self._properties is not None  # noqa: S101  # a schema with properties has made it
            self._properties.setdefault(name, []).extend(parts)
        for pattern, part in patterns.items():
            self._patterns.setdefault(pattern, []).append(part)
        if others is not None:
            self._others = others if self._others is None else both_parts([self._others, others])
        self._add_rest(schema)

    def _add_rest(self, schema: Schema) -> None:
        if "required" in schema:
            self._required = {} if self._required is None else self._required
            self._required.update(dict.fromkeys(schema["required"]))
        if "propertyNames" in schema:
            self._names.append(schema["propertyNames"])
        self._least = max(self._least, int(schema.get("minProperties", 0)))
        if "maxProperties" in schema:
            most = int(schema["maxProperties"])
            self._most = most if self._most is None else min(self._most, most)

    def schema(self) -> Schema:
        """The keywords of them all."""
        found: Schema = {}
        if self._properties is not None:
            found["properties"] = {name: _one(parts) for name, parts in self._properties.items()}
        if self._required is not None:
            found["required"] = list(self._required)
        if self._patterns:
            found["patternProperties"] = {pattern: _one(parts) for pattern, parts in self._patterns.items()}
        if self._others is not None:
            found["additionalProperties"] = self._others
        if self._names:
            found["propertyNames"] = both_parts(self._names)
        if self._least:
            found["minProperties"] = self._least
        if self._most is not None:
            found["maxProperties"] = self._most
        return found


def _one(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else both_parts(parts)


def _says_something(others: Any) -> bool:
    return others is not None and others is not True and others != {}


def _extend(
    members: dict[str, list[Any]], named: set[str], patterns: Schema, others: Any, their_patterns: Iterable[str]
) -> None:
    """Have `others` hold for the members that the schema of `named` and `patterns` does not name."""
    if any(pattern not in patterns for pattern in their_patterns):
        raise CannotMerge("additionalProperties")
    sure = [_sure(pattern) for pattern in patterns]
    for name, parts in members.items():
        if name not in named and not any(matches(term, name, _nothing) for term in sure):
            parts.append(others)


def _sure(pattern: str) -> Term:
    try:
        return pattern_to_terms(pattern)[0]
    except PatternRefused:
        raise CannotMerge("patternProperties") from None


def _nothing() -> None:
    """Names are few and short."""
