"""Strings and numbers of a schema as EBNF. Each raises UnsupportedParameter or BadRequest, naming the part."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal

from worker_node.grammars.digits import WIDEST, integer_between, number_between
from worker_node.grammars.ebnf import Rules
from worker_node.grammars.formats import FORMAT_RULES, FORMATS, REFUSED
from worker_node.grammars.merging_objects import Schema
from worker_node.grammars.multiples import fractions_between, multiples_between
from worker_node.grammars.pattern import PatternRefused, pattern_to_ebnf
from worker_node.grammars.refusals import CannotEnforce, NothingAdmitted
from worker_node.grammars.regular import TooManyStates, regular_to_ebnf
from worker_node.grammars.repetition import repeated
from worker_node.grammars.texts import string_term

# Counting costs the runtime time and memory: a longer text or list is simply not written.
MAX_COUNT = 2048
# A length beside a pattern becomes states of an automaton.
_MAX_STATES_OF_LENGTH = 200
# Quotients of the widest number and this have 27 digits; decimals here compute with 28.
_LEAST_STEP = Decimal("1e-12")


def string(rules: Rules, spend: Callable[[], None], schema: Schema, path: str) -> str:
    """A string, with a length, a format, patterns, or constants that it must not be."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    counted = bool(least or most is not None)
    held = [key for key in ("pattern", "format") if key in schema and _is_held(key, schema[key], path)]
    if most is not None and most < least:
        raise NothingAdmitted(path, "maxLength is below minLength")
    if "format" in held:
        if len(held) + counted + ("not" in schema) > 1:
            raise CannotEnforce(path, "format", "cannot be enforced beside another condition on the string")
        rules.include(FORMAT_RULES)
        return rules.add("format", f'"\\"" ({FORMATS[schema["format"]]}) "\\""')
    pattern = schema.get("pattern")
    if "not" in schema or (held and counted) or isinstance(pattern, tuple):
        return _automaton(rules, spend, schema, path)
    if pattern is not None:
        try:
            inner = pattern_to_ebnf(pattern, rules, spend)
        except PatternRefused as error:
            raise CannotEnforce(path, "pattern", f"cannot be enforced: {error}") from None
        if inner is None:
            raise NothingAdmitted(path, "no text matches the pattern")
        return rules.add("text", f'"\\"" {inner} "\\""')
    if not counted:
        return "string"
    if least > MAX_COUNT:
        raise CannotEnforce(path, "minLength", f"{least} cannot be enforced, the bound here is {MAX_COUNT}")
    body = repeated(rules, "char", least, None if most is None else min(most, MAX_COUNT))
    return rules.add("text", f'"\\"" {body} "\\""')


def _automaton(rules: Rules, spend: Callable[[], None], schema: Schema, path: str) -> str:
    keyword = next(key for key in ("pattern", "not") if key in schema)
    most = schema.get("maxLength")
    if schema.get("minLength", 0) > _MAX_STATES_OF_LENGTH or (most is not None and most > _MAX_STATES_OF_LENGTH):
        # The longer texts are not written: a pattern that ends by itself is shorter anyway.
        schema = schema | {"maxLength": _MAX_STATES_OF_LENGTH}
        if schema.get("minLength", 0) > _MAX_STATES_OF_LENGTH:
            raise CannotEnforce(path, "minLength", "cannot be enforced beside a pattern")
    try:
        term = string_term(schema)
        inner = regular_to_ebnf(term, rules, spend)
    except (PatternRefused, TooManyStates) as error:
        raise CannotEnforce(
            path, keyword, f"cannot be enforced beside another condition on the string: {error}"
        ) from None
    if inner is None:
        raise NothingAdmitted(path, "no text matches all of its conditions")
    return rules.add("text", f'"\\"" {inner} "\\""')


def _is_held(keyword: str, value: str, path: str) -> bool:
    if keyword == "format" and value in REFUSED:
        raise CannotEnforce(path, "format", f"{value} cannot be enforced")
    return keyword == "pattern" or value in FORMATS


def integer(rules: Rules, schema: Schema, path: str) -> str:
    """A whole number, between bounds or not, or a multiple of one."""
    low, high, above, below = _bounds(schema)
    step = _step(schema, path)
    if low is None and high is None and 1 % step == 0:
        return "integer"
    first = _whole(low, above, up=True, default=-WIDEST)
    last = _whole(high, below, up=False, default=WIDEST)
    if first > last:
        raise NothingAdmitted(path, "no whole number lies between the bounds, or they are too large")
    if 1 % step == 0:
        return rules.add("integer", integer_between(first, last))
    bounds = None if low is None else first, None if high is None else last
    return rules.add("integer", _multiples(rules, bounds, step, path))


def _step(schema: Schema, path: str) -> Decimal:
    step = Decimal(json.dumps(schema.get("multipleOf", 1))).normalize()
    if step <= 0:
        raise CannotEnforce(path, "multipleOf", "should be above zero")
    # Beyond, whole numbers and remainders have more digits than are computed with.
    if not _LEAST_STEP <= step <= WIDEST:
        raise CannotEnforce(path, "multipleOf", f"below {_LEAST_STEP} and above {WIDEST} cannot be enforced")
    return step


def _multiples(rules: Rules, bounds: tuple[int | None, int | None], step: Decimal, path: str) -> str:
    if step != int(step):
        raise CannotEnforce(path, "multipleOf", "only whole numbers and powers of ten can be enforced")
    ebnf = multiples_between(rules, *bounds, int(step))
    if ebnf == "":
        raise NothingAdmitted(path, f"no multiple of {step} lies between the bounds")
    if ebnf is None:
        raise CannotEnforce(
            path, "multipleOf", f"{step} can only be enforced with a minimum and a maximum that are closer together"
        )
    return ebnf


def number(rules: Rules, schema: Schema, path: str) -> str:
    """A number, between bounds or not, or a multiple of a whole number or of a power of ten."""
    low, high, above, below = _bounds(schema)
    decimals = None
    if "multipleOf" in schema:
        step = _step(schema, path)
        if step == int(step):
            return integer(rules, schema, path)
        exponent = step.adjusted()
        if exponent < -9 or step != Decimal(1).scaleb(exponent):
            return rules.add("number", _fractions(schema, step, path))
        decimals = -exponent
    if low is None and high is None and decimals is None:
        return "number"
    _check_width(low, high, path)
    widest = Decimal(WIDEST if decimals is None else WIDEST // 10**decimals)
    ebnf = number_between(
        -widest if low is None else low,
        widest if high is None else high,
        above=above,
        below=below,
        decimals=decimals,
    )
    if ebnf is None:
        raise NothingAdmitted(path, "no number of at most six decimals lies between the bounds")
    return rules.add("number", ebnf)


def _fractions(schema: Schema, step: Decimal, path: str) -> str:
    low, high, above, below = _bounds(schema)
    _check_width(low, high, path)
    ebnf = fractions_between(low, high, step, above=above, below=below)
    if ebnf == "":
        raise NothingAdmitted(path, f"no multiple of {step} lies between the bounds")
    if ebnf is None:
        raise CannotEnforce(
            path, "multipleOf", f"{step} can only be enforced with a minimum and a maximum that are closer together"
        )
    return ebnf


def _bounds(schema: Schema) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """Lower and upper bound, and whether each is itself excluded."""
    low, high = _exact(schema.get("minimum")), _exact(schema.get("maximum"))
    over, under = _exact(schema.get("exclusiveMinimum")), _exact(schema.get("exclusiveMaximum"))
    above = over is not None and (low is None or over >= low)
    below = under is not None and (high is None or under <= high)
    return over if above else low, under if below else high, above, below


def _check_width(low: Decimal | None, high: Decimal | None, path: str) -> None:
    if any(bound is not None and abs(bound) > WIDEST for bound in (low, high)):
        raise CannotEnforce(path, "minimum" if low is not None else "maximum", f"beyond {WIDEST} cannot be enforced")


def _exact(value: float | None) -> Decimal | None:
    return None if value is None else Decimal(json.dumps(value))


def _whole(bound: Decimal | None, excluded: bool, *, up: bool, default: int) -> int:
    if bound is None or abs(bound) > WIDEST:
        return default if bound is None or (bound < 0) == up else -default
    whole = int(bound.to_integral_value("ROUND_CEILING" if up else "ROUND_FLOOR"))
    if excluded and whole == bound:
        whole += 1 if up else -1
    return whole
