"""Multiples of a number: of a whole one digit by digit, of a fraction written out."""

from __future__ import annotations

from decimal import Decimal

from worker_node.grammars.digits import WIDEST, integer_between
from worker_node.grammars.ebnf import Rules

# So many multiples are written out.
_FEW = 256
# For steps up to this, the remainders so far are the states of an automaton.
_MAX_STEP = 64


def multiples_between(rules: Rules, low: int | None, high: int | None, step: int) -> str | None:
    """The EBNF of the multiples of `step` from `low` to `high` (None: no bound).

    "" if there are none; None if the bounds are too far apart, or other than zero on one side.
    """
    first = -(WIDEST // step) if low is None else -(-low // step)
    last = WIDEST // step if high is None else high // step
    if first > last:
        return ""
    if last - first < _FEW:
        return " | ".join(f'"{number * step}"' for number in range(first, last + 1))
    zeros = len(str(step)) - 1
    if step == 10**zeros:
        # Zero is written without the zeros that the others end with.
        ranges = [(max(first, 1), last), (first, min(last, -1))]
        parts = [f'({integer_between(one, other)}) "{"0" * zeros}"' for one, other in ranges if one <= other]
        return " | ".join([*parts, *(['"0"'] if first <= 0 <= last else [])])
    if step > _MAX_STEP or (low is not None and first not in {0, 1}) or (high is not None and last not in {0, -1}):
        return None
    positive = _by_remainder(rules, step)
    signs = [positive] if high is None else []
    signs += [f'"-" {positive}'] if low is None else []
    return " | ".join([*signs, *(['"0"'] if first <= 0 <= last else [])])


def _by_remainder(rules: Rules, step: int) -> str:
    """The multiples above zero: after each digit, what is left over."""
    names = [rules.reserve("left") for _ in range(step)]
    for left, name in enumerate(names):
        ways = [f"{_digits(digits)} {names[after]}" for after, digits in _moves(left, step, range(10)).items()]
        rules.define(name, " | ".join([*ways, *(['""'] if not left else [])]))
    moves = _moves(0, step, range(1, 10))
    return rules.add("multiple", " | ".join(f"{_digits(digits)} {names[after]}" for after, digits in moves.items()))


def _moves(left: int, step: int, digits: range) -> dict[int, list[int]]:
    moves: dict[int, list[int]] = {}
    for digit in digits:
        moves.setdefault((left * 10 + digit) % step, []).append(digit)
    return moves


def _digits(digits: list[int]) -> str:
    return f'"{digits[0]}"' if len(digits) == 1 else f"[{''.join(map(str, digits))}]"


def fractions_between(
    low: Decimal | None, high: Decimal | None, step: Decimal, *, above: bool, below: bool
) -> str | None:
    """The EBNF of the multiples of a step that is no whole number, from `low` to `high` (`above`, `below`: without it).

    "" if there are none; None if the bounds are too far apart, or other than zero on one side.
    """
    if low is not None and high is not None:
        first, last = (low / step).to_integral_value("ROUND_CEILING"), (high / step).to_integral_value("ROUND_FLOOR")
        first += above and first * step == low
        last -= below and last * step == high
        if last - first >= _FEW:
            return None
        return " | ".join(f'"{(number * step).normalize():f}"' for number in range(int(first), int(last) + 1))
    if 1 % step or step < Decimal(1) / _MAX_STEP or high is not None or low not in {None, 0}:
        return None
    parts = " | ".join(f'"{f"{number * step:f}"[1:]}"' for number in range(1, int(1 / step)))
    if above:
        return f'"0" ({parts}) | [1-9] [0-9]{{0,8}} ({parts})?'
    sign = "" if low == 0 else '"-"? '
    return f'{sign}("0" | [1-9] [0-9]{{0,8}}) ({parts})?'
