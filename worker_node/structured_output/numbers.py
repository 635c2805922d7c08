"""Integers and decimals of a schema as EBNF, digit by digit.

A bound is exact whatever its size, or refused by name. A side without a bound ends at numbers of about 15 digits:
leaving numbers out is allowed, admitting more is not. Decimals have a fixed number of places, so that both bounds are
ranges of whole numbers of units.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from worker_node.structured_output.ebnf import Rules
from worker_node.structured_output.keywords import CannotEnforce, NothingAdmitted, Schema

# Digits of numbers on a side without a bound, and on a side whose bound is hardly meant (1.8e308).
_USUAL_DIGITS = 15
_MOST_DIGITS = 20
_MOST_DIGITS_OF_A_BOUND = 100
# Decimals of so many digits in all are different doubles.
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
        """The first and the last number of units of so many decimals."""
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
        return " | ".join(_written(number * step, decimals) for number in range(first, last + 1))
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
    return " | ".join([*signs, *([_written(0, decimals)] if first <= 0 <= last else [])])


def _fractions(step: int, decimals: int) -> str:
    """The decimals above zero whose fraction is a multiple of a step that divides one."""
    parts = [f'"{number:0{decimals}}"' for number in range(0, 10**decimals, step)]
    whole = f'[1-9] [0-9]{{0,{_DIGITS_OF_A_DOUBLE - decimals - 1}}} "." ({" | ".join(parts)})'
    return f'{whole} | "0." ({" | ".join(parts[1:])})'


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
    return f'"{"-" * (units < 0)}{digits[: len(digits) - decimals]}{point}"'


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
