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
from typing import Any, NamedTuple

from worker_node.structured_output.ebnf import Rules, literal, one_text
from worker_node.structured_output.keywords import TYPES, CannotEnforce, NothingAdmitted, Schema
from worker_node.structured_output.pattern import PatternRefused, pattern_term, term_to_ebnf
from worker_node.structured_output.regular import (
    ANY_CHARACTER,
    EVERYTHING,
    NOTHING,
    Term,
    TooManyStates,
    both,
    either,
    lengths,
    matches,
    regular_to_ebnf,
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
_LABEL = "[a-z0-9]{1,15}(-[a-z0-9]{1,10}){0,3}"
_HOST = rf"({_LABEL}\.){{1,3}}[a-z]{{2,12}}"
_EMAIL = rf"[a-zA-Z0-9_+-]{{1,30}}(\.[a-zA-Z0-9_+-]{{1,15}})?@{_HOST}"
_WORD = "[a-zA-Z0-9._~-]"
_PATH = rf"(/{_WORD}{{0,40}}){{0,8}}(\?{_WORD}{{0,40}}={_WORD}{{0,40}})?"
_LINK = f"https?://{_HOST}{_PATH}"
_REFERENCE = f"{_LINK}|/{_WORD}{{0,40}}{_PATH}"
_POINTER = "(/[a-zA-Z0-9._-]{0,15}){0,5}"
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
    **dict.fromkeys(("uri", "uri-template", "iri"), _LINK),
    **dict.fromkeys(("uri-reference", "iri-reference"), _REFERENCE),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]{{0,3}}){_POINTER}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|{_SPAN}W)",
}
REFUSED_FORMATS = frozenset({"regex"})
# Counts of two digits keep texts short; in an automaton each would be states.
_COUNT = re.compile(r"\{([01]),\d\d\}")


def string(rules: Rules, spend: Callable[[], None], schema: Schema, path: str) -> str:
    """The rule of a string with a length, a format and patterns. Raises CannotEnforce, NothingAdmitted."""
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength", math.inf)
    if most < least:
        raise NothingAdmitted(path, "maxLength is below minLength")
    expressions = _expressions(schema, path)
    if not expressions:
        if not least and most == math.inf:
            return "string"
        if least > MAX_LENGTH:
            raise CannotEnforce(path, "minLength", f"{least} cannot be enforced, the bound here is {MAX_LENGTH}")
        counted = rules.repeated("char", least, None if most == math.inf else min(int(most), MAX_LENGTH))
        return rules.add("text", f'"\\"" {counted} "\\""')
    keyword = "format" if schema.get("format") in FORMATS else "pattern"
    try:
        alone = pattern_term(expressions[0], search=False)
        shortest, longest = lengths(alone)
        if len(expressions) == 1 and least <= shortest and longest <= most:
            inner = term_to_ebnf(alone, rules, spend)
        else:
            if least > _MAX_LENGTH_OF_AN_AUTOMATON:
                raise CannotEnforce(path, "minLength", "cannot be enforced beside a pattern or a format")
            inner = regular_to_ebnf(string_term(schema, most=_MAX_LENGTH_OF_AN_AUTOMATON), rules, spend)
    except (PatternRefused, TooManyStates) as error:
        beside = " beside another condition on the string" * (len(expressions) > 1 or "maxLength" in schema)
        raise CannotEnforce(path, keyword, f"cannot be enforced{beside}: {error}") from None
    if inner is None:
        raise NothingAdmitted(path, "no text matches all of its conditions")
    return rules.add("text", f'"\\"" {inner} "\\""')


def _expressions(schema: Schema, path: str) -> list[str]:
    """The expressions that the string has to match, the format's as one of them."""
    patterns = schema.get("pattern", ())
    name = schema.get("format")
    if name in REFUSED_FORMATS:
        raise CannotEnforce(path, "format", f"{name} cannot be enforced")
    return [*((patterns,) if isinstance(patterns, str) else patterns), *([FORMATS[name]] if name in FORMATS else [])]


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


def fits(value: Any, schema: Schema, spend: Callable[[], None]) -> bool:
    """Whether a constant that is no list or object matches a plain schema. Raises PatternRefused, ValueError."""
    if isinstance(value, str):
        if schema.get("format") in FORMATS:
            raise PatternRefused("a format beside constants")
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


# Digits of numbers on a side without a bound, and on a side whose bound is hardly meant (1.8e308).
_USUAL_DIGITS = 15
_MOST_DIGITS = 20
_MOST_DIGITS_OF_A_BOUND = 100
# Up to this many digits different decimals are different doubles.
_DIGITS_OF_A_DOUBLE = 15
_MIN_DECIMALS = 2
_MAX_DECIMALS = 6
_MAX_STEP_DECIMALS = 12
# So many multiples are written out; for steps up to the second, the remainders so far are the states of an automaton.
_FEW = 256
_MAX_STEP = 64
_DIGITS_OF_A_MULTIPLE = 9

Digits = list[str]


def number(rules: Rules, schema: Schema, path: str, *, whole: bool) -> str:
    """The rule of a number, or of a `whole` one, between bounds or not, or a multiple of a step.

    Raises CannotEnforce, NothingAdmitted.
    """
    bounds = _Bounds.of(schema)
    step = _step(schema, path)
    if step is not None and whole:
        step = Fraction(step.numerator)
    if step == 1 and whole:
        step = None
    if step is None and bounds.low is bounds.high is None:
        return "integer" if whole else "number"
    decimals = 0 if whole else _decimals(bounds, step, path)
    bounds.check(decimals, path, whole=whole)
    first, last = bounds.units(decimals)
    if first > last:
        raise NothingAdmitted(path, "no number with the decimals that are written lies between the bounds")
    if step is None:
        return rules.add("number", _range(first, last, decimals))
    ebnf = _multiples(rules, (first, last), int(step * 10**decimals), decimals)
    if ebnf is None:
        raise CannotEnforce(
            path,
            "multipleOf",
            f"{schema['multipleOf']} can only be enforced with a minimum and a maximum that are closer together",
        )
    if not ebnf:
        raise NothingAdmitted(path, f"no multiple of {schema['multipleOf']} lies between the bounds")
    return rules.add("number", ebnf)


class _Bounds(NamedTuple):
    """`above` and `below`: the bound itself is excluded."""

    low: Fraction | None
    high: Fraction | None
    above: bool
    below: bool

    @classmethod
    def of(cls, schema: Schema) -> _Bounds:
        low, high, over, under = (
            Fraction(json.dumps(schema[key])) if key in schema else None
            for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        )
        above = over is not None and (low is None or over >= low)
        below = under is not None and (high is None or under <= high)
        return cls(over if above else low, under if below else high, above, below)

    def check(self, decimals: int, path: str, *, whole: bool) -> None:
        """Refuse bounds of too many digits, fewer where readers with doubles could take the next decimal for the bound.

        A lower bound far below zero, or an upper one far above, refuses nothing: it loosens.
        """
        for bound, excluded, name, sign in (
            (self.low, self.above, "Minimum", 1),
            (self.high, self.below, "Maximum", -1),
        ):
            most = _MOST_DIGITS_OF_A_BOUND if whole or not excluded else _DIGITS_OF_A_DOUBLE - decimals
            if bound is not None and (excluded or bound * sign > 0) and _length(bound) > most:
                keyword = f"exclusive{name}" if excluded else name.lower()
                raise CannotEnforce(path, keyword, f"a bound of more than {most} digits cannot be enforced here")

    def units(self, decimals: int) -> tuple[int, int]:
        """The first and the last number, in units of the last decimal place."""
        scale = 10**decimals
        first = None if self.low is None else math.ceil(self.low * scale)
        last = None if self.high is None else math.floor(self.high * scale)
        first = None if first is None else first + (self.above and first == self.low * scale)
        last = None if last is None else last - (self.below and last == self.high * scale)
        lowest, highest = -_far(last, first), _far(first, last)
        return (lowest if first is None else max(first, lowest)), (highest if last is None else min(last, highest))


def _far(other: int | None, own: int | None) -> int:
    """Where a side ends that has no bound, or one far from the `other` side."""
    return int(10 ** max(_USUAL_DIGITS if own is None else _MOST_DIGITS, len(str(abs(other or 0))) + 1)) - 1


def _length(bound: Fraction) -> int:
    """The digits before the point."""
    return len(str(abs(math.trunc(bound))))


def _step(schema: Schema, path: str) -> Fraction | None:
    if "multipleOf" not in schema:
        return None
    step = Fraction(json.dumps(schema["multipleOf"]))
    if step <= 0:
        raise CannotEnforce(path, "multipleOf", "should be above zero")
    return step


def _decimals(bounds: _Bounds, step: Fraction | None, path: str) -> int:
    """How many decimals are written."""
    if step is not None:
        found = next((n for n in range(_MAX_STEP_DECIMALS + 1) if (step * 10**n).denominator == 1), None)
        if found is None:
            raise CannotEnforce(path, "multipleOf", f"more than {_MAX_STEP_DECIMALS} decimals cannot be enforced")
        return found
    given = [bound for bound in (bounds.low, bounds.high) if bound is not None]
    wanted = next(
        (n for n in range(_MIN_DECIMALS, _MAX_DECIMALS) if all((bound * 10**n).denominator == 1 for bound in given)),
        _MAX_DECIMALS,
    )
    excluded = [bound for bound, excluded in zip(bounds[:2], bounds[2:], strict=True) if bound is not None and excluded]
    return max(0, min([wanted, *(_DIGITS_OF_A_DOUBLE - _length(bound) for bound in excluded)]))


def _multiples(rules: Rules, units: tuple[int, int], step: int, decimals: int) -> str | None:
    """The EBNF of the multiples of `step` among the `units`; "" if there are none.

    None if they are many, and the step is large or a bound other than zero is near.
    """
    first, last = -(-units[0] // step), units[1] // step
    if last - first < _FEW:
        return one_text(_written(number * step, decimals) for number in range(first, last + 1))
    zeros = 0 if decimals else len(str(step)) - len(str(step).rstrip("0"))
    odd = step // 10**zeros
    if odd == 1:
        # Zero is written without the zeros that the others end with.
        ranges = [(max(first, 1), last), (first, min(last, -1))] if zeros else [(first, last)]
        tail = f' "{"0" * zeros}"' if zeros else ""
        parts = [f"({_range(low, high, decimals)}){tail}" for low, high in ranges if low <= high]
        return " | ".join([*parts, *(['"0"'] if zeros and first <= 0 <= last else [])])
    far = 10**_USUAL_DIGITS - 1
    if not (units[0] <= -far or first in {0, 1}) or not (units[1] >= far or last in {0, -1}):
        return None
    if (10**decimals % step if decimals else odd > _MAX_STEP) or 10**decimals > _FEW * step:
        return None
    positive = _fractions(step, decimals) if decimals else f'({_by_remainder(rules, odd)}) "{"0" * zeros}"'
    signs = [f"{sign}({positive})" for sign, bound in (("", last), ('"-" ', -first)) if bound > 0]
    return " | ".join([*signs, *([literal(_written(0, decimals))] if first <= 0 <= last else [])])


def _fractions(step: int, decimals: int) -> str:
    """The decimals above zero whose fraction is a multiple of a step that divides one."""
    parts = [f"{number:0{decimals}}" for number in range(0, 10**decimals, step)]
    whole = f'[1-9] [0-9]{{0,{_DIGITS_OF_A_DOUBLE - decimals - 1}}} "." ({one_text(parts)})'
    return f'{whole} | "0." ({one_text(parts[1:])})'


def _by_remainder(rules: Rules, step: int) -> str:
    """The multiples above zero, of a few digits: a rule for each remainder so far and number of further digits."""
    names = [rules.add("left", '""')] + [""] * (step - 1)
    for _ in range(_DIGITS_OF_A_MULTIPLE - 1):
        ways = [[*_moves(left, range(10), names), *(['""'] if not left else [])] for left in range(step)]
        names = [rules.add("left", " | ".join(way)) if way else "" for way in ways]
    return " | ".join(_moves(0, range(1, 10), names))


def _moves(left: int, digits: range, names: list[str]) -> list[str]:
    after: dict[int, str] = {}
    for digit in digits:
        remainder = (left * 10 + digit) % len(names)
        if names[remainder]:
            after[remainder] = after.get(remainder, "") + str(digit)
    return [f"[{chosen}] {names[remainder]}" for remainder, chosen in after.items()]


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
