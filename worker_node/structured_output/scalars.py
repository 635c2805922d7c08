"""Strings and numbers of a schema as EBNF.

A string may have a length, a format and patterns, each alone or all at once. A bound of numbers is exact whatever its
size, or refused by name. A side without a bound ends at numbers of about 15 digits: leaving numbers out is allowed,
admitting more is not. Decimals have a fixed number of places, so that both bounds are ranges of whole numbers of units.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from worker_node.structured_output.ebnf import Rules, one_text
from worker_node.structured_output.keywords import CannotEnforce, NothingAdmitted, Schema
from worker_node.structured_output.pattern import PatternRefused, pattern_term, term_to_ebnf
from worker_node.structured_output.regular import (
    ANY_CHARACTER,
    EVERYTHING,
    NOTHING,
    Term,
    both,
    either,
    lengths,
    text,
    times,
)

# Counting costs the runtime time and memory: a longer text is simply not written, beside a pattern still earlier.
MAX_LENGTH = 2048
_MAX_LENGTH_OF_AN_AUTOMATON = 200

_DATE = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[-+]{_HOUR}:[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Two hyphens in a row would begin an encoded name, as in "xn--".
_HOST = r"[a-z0-9]{1,15}(-[a-z0-9]{1,10}){0,3}(\.[a-z]{2,12}){1,3}"
_EMAIL = rf"[a-zA-Z0-9_+-]{{1,30}}(\.[a-zA-Z0-9_+-]{{1,15}})?@{_HOST}"
_WORD = "[a-zA-Z0-9._~-]"
_LINK = rf"https?://{_HOST}(/{_WORD}{{0,40}}){{0,8}}(\?{_WORD}{{0,40}}={_WORD}{{0,40}})?"
_GROUP = "[0-9a-f]{1,4}"
# Groups on both sides of the `::` that stands for those left out.
_SHORT = "|".join(f"{_GROUP}(:{_GROUP}){{{n - 1}}}::({_GROUP}(:{_GROUP}){{0,{5 - n}}})?" for n in range(1, 6))
_SPAN = "[0-9]{1,4}"
_DAYS = f"({_SPAN}Y({_SPAN}M({_SPAN}D)?)?|{_SPAN}M({_SPAN}D)?|{_SPAN}D)"
_HOURS = f"T({_SPAN}H({_SPAN}M({_SPAN}S)?)?|{_SPAN}M({_SPAN}S)?|{_SPAN}S)"
# Formats of the JSON Schema standard, as expressions of their common forms. Other formats are annotations.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"{_GROUP}(:{_GROUP}){{7}}|::({_GROUP}(:{_GROUP}){{0,5}})?|{_SHORT}|{_GROUP}(:{_GROUP}){{5}}::",
    **dict.fromkeys(("hostname", "idn-hostname"), _HOST),
    **dict.fromkeys(("email", "idn-email"), _EMAIL),
    **dict.fromkeys(("uri", "uri-reference", "iri", "iri-reference", "uri-template"), _LINK),
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|{_SPAN}W)",
}
REFUSED_FORMATS = frozenset({"regex", "json-pointer", "relative-json-pointer"})
# Counts of two digits keep texts short; in an automaton each would be states.
_COUNT = re.compile(r"\{([01]),\d\d\}")


def string(rules: Rules, spend: Callable[[], None], schema: Schema, path: str) -> str:
    """The rule of a string with a length, a format and patterns. Raises CannotEnforce, NothingAdmitted."""
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength", math.inf)
    if most < least:
        raise NothingAdmitted(path, "maxLength is below minLength")
    name, patterns = schema.get("format"), schema.get("pattern", ())
    if name in REFUSED_FORMATS:
        raise CannotEnforce(path, "format", f"{name} cannot be enforced")
    expressions = [*((patterns,) if isinstance(patterns, str) else patterns)]
    expressions += [FORMATS[name]] if name in FORMATS else []
    if not expressions:
        if not least and most == math.inf:
            return "string"
        if least > MAX_LENGTH:
            raise CannotEnforce(path, "minLength", f"{least} cannot be enforced, the bound here is {MAX_LENGTH}")
        counted = rules.repeated("char", least, None if most == math.inf else min(int(most), MAX_LENGTH))
        return rules.add("text", f'"\\"" {counted} "\\""')
    keyword = "format" if name in FORMATS else "pattern"
    try:
        term = pattern_term(expressions[0], search=False)
        shortest, longest = lengths(term)
        if len(expressions) > 1 or shortest < least or longest > most:
            if least > _MAX_LENGTH_OF_AN_AUTOMATON:
                raise CannotEnforce(path, "minLength", "cannot be enforced beside a pattern or a format")
            term = string_term(schema, most=_MAX_LENGTH_OF_AN_AUTOMATON)
        inner = term_to_ebnf(term, rules, spend)
    except PatternRefused as error:
        beside = " beside another condition on the string" * (len(expressions) > 1 or "maxLength" in schema)
        raise CannotEnforce(path, keyword, f"cannot be enforced{beside}: {error}") from None
    if inner is None:
        raise NothingAdmitted(path, "no text that can be written here matches all of its conditions")
    return rules.add("text", f'"\\"" {inner} "\\""')


def string_term(schema: Schema, most: int | None = None) -> Term:
    """The strings that match a plain schema, none longer than `most`. Raises PatternRefused."""
    if "string" not in schema.get("type", "string"):
        return NOTHING
    conditions = []
    if "enum" in schema:
        conditions.append(either(text(value) for value in schema["enum"] if isinstance(value, str)))
    patterns = schema.get("pattern", ())
    conditions += [pattern_term(one, search=True) for one in ((patterns,) if isinstance(patterns, str) else patterns)]
    if schema.get("format") in FORMATS:
        loose = _COUNT.sub(lambda count: "*" if count[1] == "0" else "+", FORMATS[schema["format"]])
        conditions.append(pattern_term(loose, search=False))
    if "minLength" in schema or "maxLength" in schema:
        longest = min(schema.get("maxLength", math.inf), math.inf if most is None else most)
        longest_or_none = None if longest == math.inf else int(longest)
        conditions.append(times(ANY_CHARACTER, int(schema.get("minLength", 0)), longest_or_none))
    return both(conditions) if conditions else EVERYTHING


# Digits of numbers on a side without a bound. Up to this many, different decimals are different doubles.
_USUAL_DIGITS = 15
_MIN_DECIMALS = 2
_MAX_DECIMALS = 6
# So many multiples are written out.
_FEW = 256

Digits = list[str]


def number(rules: Rules, schema: Schema, path: str, *, whole: bool) -> str:
    """The rule of a number between bounds or not, or a multiple. Raises CannotEnforce, NothingAdmitted."""
    low, high, over, under = (
        Fraction(json.dumps(schema[key])) if key in schema else None
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    )
    given = [bound for bound in (low, high, over, under) if bound is not None]
    step = Fraction(json.dumps(schema["multipleOf"])) if "multipleOf" in schema else None
    if step is not None and step <= 0:
        raise CannotEnforce(path, "multipleOf", "must be above zero")
    if step is not None and whole:
        step = Fraction(step.numerator)
    if not given and (step is None or (step == 1 and whole)):
        return "integer" if whole else "number"
    decimals = 0 if whole else _decimals(given, _MIN_DECIMALS) if step is None else _decimals([step], 0)
    scale = 10**decimals
    if step is not None and (step * scale).denominator != 1:
        raise CannotEnforce(path, "multipleOf", f"more than {_MAX_DECIMALS} decimals cannot be enforced")
    lows = [math.ceil(low * scale)] if low is not None else []
    lows += [math.floor(over * scale) + 1] if over is not None else []
    highs = [math.floor(high * scale)] if high is not None else []
    highs += [math.ceil(under * scale) - 1] if under is not None else []
    first, last = max([_far(highs, -1, whole=whole), *lows]), min([_far(lows, 1, whole=whole), *highs])
    if first > last and max(map(abs, [*lows, *highs])) >= 10**_USUAL_DIGITS and not whole:
        keyword = next(key for key in schema if "imum" in key)
        raise CannotEnforce(path, keyword, "a decimal of that many digits cannot be enforced")
    if first > last:
        raise NothingAdmitted(
            path, f"no number with {decimals} decimals, as it would be written here, lies between the bounds"
        )
    ebnf = _range(first, last, decimals) if step is None else _multiples(first, last, int(step * scale), decimals)
    if ebnf is None:
        raise CannotEnforce(
            path,
            "multipleOf",
            f"{schema['multipleOf']} can only be enforced with a minimum and a maximum that are closer together",
        )
    if not ebnf:
        raise NothingAdmitted(path, f"no multiple of {schema['multipleOf']} lies between the bounds")
    return rules.add("number", ebnf)


def _far(others: list[int], sign: int, *, whole: bool) -> int:
    """Where a side ends that has no bound, or one far from that of the other side."""
    digits = [len(str(abs(bound))) + 1 for bound in others if whole and bound * sign > 0]
    return sign * (int(10 ** max([_USUAL_DIGITS, *digits])) - 1)


def _decimals(given: list[Fraction], least: int) -> int:
    """How many decimals are written: as many as these numbers have."""
    enough = (n for n in range(least, _MAX_DECIMALS) if all((one * 10**n).denominator == 1 for one in given))
    return next(enough, _MAX_DECIMALS)


def _multiples(low: int, high: int, step: int, decimals: int) -> str | None:
    """The EBNF of the multiples of `step` between two numbers of units; "" if there are none, None if they are many."""
    first, last = -(-low // step), high // step
    if last - first < _FEW:
        return one_text(_written(number * step, decimals) for number in range(first, last + 1))
    if step == 1:
        return _range(low, high, decimals)
    endless = 10**_USUAL_DIGITS - 1
    if low not in {0, -endless} or high != endless or 10 ** max(1, decimals) % step:
        return None
    # Where the step divides ten, or one, only the last digits count.
    sign = '"-"? ' if low else ""
    if not decimals:
        return f"{sign}([1-9] [0-9]{{0,{_USUAL_DIGITS - 2}}})? ({one_text(map(str, range(0, 10, step)))})"
    fractions = one_text(f"{part:0{decimals}}" for part in range(0, 10**decimals, step))
    return f'{sign}("0" | [1-9] [0-9]{{0,{_USUAL_DIGITS - decimals - 1}}}) "." ({fractions})'


def _written(units: int, decimals: int) -> str:
    digits = str(abs(units)).zfill(decimals + 1)
    point = f".{digits[-decimals:]}" if decimals else ""
    return f"{'-' * (units < 0)}{digits[: len(digits) - decimals]}{point}"


def _range(low: int, high: int, decimals: int) -> str:
    """The EBNF of the numbers of units from `low` to `high`, which is not below it."""
    parts: list[str] = []
    if low < 0:
        parts += ['"-" ' + _render(digits, decimals) for digits in _ranges(max(1, -high), -low, decimals + 1)]
    if high >= 0:
        parts += [_render(digits, decimals) for digits in _ranges(max(0, low), high, decimals + 1)]
    return " | ".join(parts)


def _render(digits: Digits, decimals: int) -> str:
    if decimals:
        digits = [*digits[:-decimals], '"."', *digits[-decimals:]]
    return " ".join(digits)


def _digit(low: int, high: int) -> str:
    return f'"{low}"' if low == high else f"[{low}-{high}]"


def _ranges(low: int, high: int, width: int) -> Iterator[Digits]:
    """Digit ranges that together are the numbers from `low` to `high`, written with at least `width` digits."""
    while low <= high:
        length = max(width, len(str(low)))
        if low == 10 ** (length - 1) and high >= 10 ** (length + 1):
            # All numbers of several lengths at once: the runtime let a leading zero pass when each was an alternative.
            longest = len(str(high + 1)) - 1
            yield ["[1-9]", f"[0-9]{{0,{longest - length}}}", *["[0-9]"] * (length - 1)]
            low = 10**longest
            continue
        top = min(high, 10**length - 1)
        yield from _same_length(str(low).zfill(length), str(top).zfill(length))
        low = top + 1


def _same_length(low: str, high: str) -> Iterator[Digits]:
    if not low:
        yield []
        return
    first, last = int(low[0]), int(high[0])
    rest = len(low) - 1
    if first == last:
        yield from ([_digit(first, first), *tail] for tail in _same_length(low[1:], high[1:]))
        return
    zeros, nines = "0" * rest, "9" * rest
    if low[1:] != zeros:
        yield from ([_digit(first, first), *tail] for tail in _same_length(low[1:], nines))
        first += 1
    if high[1:] != nines:
        yield from ([_digit(last, last), *tail] for tail in _same_length(zeros, high[1:]))
        last -= 1
    if first <= last:
        yield [_digit(first, last), *["[0-9]"] * rest]
