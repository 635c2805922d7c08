"""Multiples of a whole number, digit by digit."""

from __future__ import annotations

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
