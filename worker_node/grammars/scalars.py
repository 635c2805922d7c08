"""Strings and numbers of a schema as EBNF. Each raises UnsupportedParameter or BadRequest, naming the part."""

from __future__ import annotations

import json
from decimal import Decimal

from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.grammars.digits import WIDEST, integer_between, number_between
from worker_node.grammars.ebnf import Rules
from worker_node.grammars.formats import FORMAT_RULES, FORMATS, REFUSED
from worker_node.grammars.merging import Schema
from worker_node.grammars.pattern import PatternRefused, pattern_to_ebnf
from worker_node.grammars.repetition import repeated

# Counting costs the runtime time and memory: a longer text or list is simply not written.
MAX_COUNT = 2048


def string(rules: Rules, schema: Schema, path: str) -> str:
    """A string, with a length, a format or a pattern."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    held = [key for key in ("pattern", "format") if key in schema and _is_held(key, schema[key], path)]
    if len(held) + bool(least or most is not None) > 1:
        raise UnsupportedParameter(
            f"{path}.{held[0]}: cannot be held to beside another condition on the string", param=f"{path}.{held[0]}"
        )
    if held == ["format"]:
        rules.include(FORMAT_RULES)
        return rules.add("format", f'"\\"" {FORMATS[schema["format"]]} "\\""')
    if held == ["pattern"]:
        try:
            inner = pattern_to_ebnf(schema["pattern"], rules)
        except PatternRefused as error:
            raise UnsupportedParameter(f"{path}.pattern: cannot be held to: {error}", param=f"{path}.pattern") from None
        return rules.add("text", f'"\\"" {inner} "\\""')
    if not least and most is None:
        return "string"
    if least > MAX_COUNT or (most is not None and most < least):
        raise UnsupportedParameter(f"{path}.minLength: {least} cannot be held to", param=f"{path}.minLength")
    body = repeated(rules, "char", least, None if most is None else min(most, MAX_COUNT))
    return rules.add("text", f'"\\"" {body} "\\""')


def _is_held(keyword: str, value: str, path: str) -> bool:
    if keyword == "format" and value in REFUSED:
        raise UnsupportedParameter(f"{path}.format: {value} cannot be held to", param=f"{path}.format")
    return keyword == "pattern" or value in FORMATS


def integer(rules: Rules, schema: Schema, path: str) -> str:
    """A whole number, between bounds or not."""
    if schema.get("multipleOf", 1) != 1:
        raise UnsupportedParameter(f"{path}.multipleOf: cannot be held to", param=f"{path}.multipleOf")
    low, high, above, below = _bounds(schema)
    if low is None and high is None:
        return "integer"
    first = _whole(low, above, up=True, default=-WIDEST)
    last = _whole(high, below, up=False, default=WIDEST)
    if first > last:
        raise BadRequest(f"{path}: no whole number lies between the bounds, or they are too large", param=path)
    return rules.add("integer", integer_between(first, last))


def number(rules: Rules, schema: Schema, path: str) -> str:
    """A number, between bounds or not."""
    if "multipleOf" in schema:
        raise UnsupportedParameter(f"{path}.multipleOf: cannot be held to", param=f"{path}.multipleOf")
    low, high, above, below = _bounds(schema)
    if low is None and high is None:
        return "number"
    if any(bound is not None and abs(bound) > WIDEST for bound in (low, high)):
        raise UnsupportedParameter(f"{path}: a bound beyond {WIDEST} cannot be held to", param=path)
    ebnf = number_between(
        Decimal(-WIDEST) if low is None else low,
        Decimal(WIDEST) if high is None else high,
        above=above,
        below=below,
    )
    if ebnf is None:
        raise BadRequest(f"{path}: no number of at most six decimals lies between the bounds", param=path)
    return rules.add("number", ebnf)


def _bounds(schema: Schema) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """Lower and upper bound, and whether each is itself excluded."""
    low, high = _exact(schema.get("minimum")), _exact(schema.get("maximum"))
    over, under = _exact(schema.get("exclusiveMinimum")), _exact(schema.get("exclusiveMaximum"))
    above = over is not None and (low is None or over >= low)
    below = under is not None and (high is None or under <= high)
    return over if above else low, under if below else high, above, below


def _exact(value: float | None) -> Decimal | None:
    return None if value is None else Decimal(json.dumps(value))


def _whole(bound: Decimal | None, excluded: bool, *, up: bool, default: int) -> int:
    if bound is None or abs(bound) > WIDEST:
        return default if bound is None or (bound < 0) == up else -default
    whole = int(bound.to_integral_value("ROUND_CEILING" if up else "ROUND_FLOOR"))
    if excluded and whole == bound:
        whole += 1 if up else -1
    return whole
