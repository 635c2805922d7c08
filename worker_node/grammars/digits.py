"""Whole numbers and decimals between two bounds, digit by digit."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

# Where a side has no bound of its own: far beyond what is asked for, and exact in a double.
WIDEST = 10**15
MIN_DECIMALS = 2
MAX_DECIMALS = 6

Digits = list[str]


def integer_between(low: int, high: int) -> str:
    """The EBNF of the whole numbers from `low` to `high`, which is not below it."""
    return _alternatives(low, high, decimals=0)


def number_between(
    low: Decimal, high: Decimal, *, above: bool = False, below: bool = False, decimals: int | None = None
) -> str | None:
    """The EBNF of decimals from `low` to `high` (`above`, `below`: without the bound itself).

    They are written with a fixed number of decimals: as many as given, or at least two and enough for the bounds. None
    if there are none.
    """
    if decimals is None:
        decimals = min(MAX_DECIMALS, max(MIN_DECIMALS, _decimals(low), _decimals(high)))
    scale = 10**decimals
    first, last = _ceiling(low * scale), _floor(high * scale)
    first += above and first == low * scale
    last -= below and last == high * scale
    return None if first > last else _alternatives(first, last, decimals)


def _decimals(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _ceiling(value: Decimal) -> int:
    return int(value.to_integral_value("ROUND_CEILING"))


def _floor(value: Decimal) -> int:
    return int(value.to_integral_value("ROUND_FLOOR"))


def _alternatives(low: int, high: int, decimals: int) -> str:
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
