"""The texts that a plain schema of a string admits, as a regular language."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker_node.grammars.formats import FORMATS
from worker_node.grammars.merging_objects import Schema
from worker_node.grammars.pattern import PatternRefused, pattern_to_terms
from worker_node.grammars.regular import (
    ANY_CHARACTER,
    EVERYTHING,
    NOTHING,
    Term,
    both,
    either,
    matches,
    text,
    times,
    without,
)
from worker_node.grammars.shape import TYPES


def string_term(schema: Schema) -> Term:
    """The strings that match a plain schema. Raises PatternRefused for what cannot be said."""
    kinds = schema.get("type", "string")
    if "string" not in kinds:
        return NOTHING
    if schema.get("format") in FORMATS:
        raise PatternRefused("a format beside other conditions")
    conditions = []
    if "enum" in schema:
        conditions.append(either(text(value) for value in schema["enum"] if isinstance(value, str)))
    patterns = schema.get("pattern", ())
    conditions += [pattern_to_terms(one)[0] for one in ((patterns,) if isinstance(patterns, str) else patterns)]
    if "minLength" in schema or "maxLength" in schema:
        most = schema.get("maxLength")
        conditions.append(times(ANY_CHARACTER, int(schema.get("minLength", 0)), None if most is None else int(most)))
    if "not" in schema:
        conditions.append(without(either(text(value) for value in schema["not"]["enum"])))
    return both(conditions) if conditions else EVERYTHING


def fits(value: Any, schema: Schema, spend: Callable[[], None]) -> bool:
    """Whether a constant that is no list or object matches a plain schema. Raises PatternRefused, ValueError."""
    if isinstance(value, str):
        return matches(string_term({key: part for key, part in schema.items() if key != "enum"}), value, spend)
    if isinstance(value, list | dict):
        raise ValueError("a constant that is a list or an object")
    if isinstance(value, bool) or value is None or not TYPES["number"](value):
        return True
    if schema.get("multipleOf", 1) != 1:
        raise ValueError("multipleOf")
    return all(key not in schema or holds(value, schema[key]) for key, holds in _BOUNDS.items())


_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
