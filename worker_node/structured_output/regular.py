"""Regular languages with intersection and complement, by derivatives, and as EBNF.

For strings under several conditions: a pattern and a length, keys that match one pattern and not another, expressions
that the runtime could not follow as they are written. The grammar is a deterministic automaton, one rule for each
state: a text is derived in one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from worker_node.structured_output.ebnf import (
    JSON_STRING,
    MAX_CODE,
    Ranges,
    Rules,
    Writing,
    literal,
    merged_ranges,
    one_of,
)

MAX_STATES = 256

# A kind and its parts: a set of characters, terms in a row, any or both of some, none of one, a repetition (with -1
# for no most). Equal terms are equal languages, so far as the functions here can tell.
Term = tuple[Any, ...]

NOTHING: Term = ("any", frozenset())
EMPTY: Term = ("row", ())
ANY_CHARACTER: Term = ("set", ((0, MAX_CODE),))
EVERYTHING: Term = ("times", ANY_CHARACTER, 0, -1)


class TooManyStates(ValueError):
    """The automaton is larger than is worth compiling."""


def characters(ranges: Ranges) -> Term:
    merged = merged_ranges(ranges)
    return ("set", merged) if merged else NOTHING


def text(value: str) -> Term:
    return row(("set", ((ord(character), ord(character)),)) for character in value)


def row(terms: Iterable[Term]) -> Term:
    flat: list[Term] = []
    for term in terms:
        if term == NOTHING:
            return NOTHING
        flat += term[1] if term[0] == "row" else (term,)
    return flat[0] if len(flat) == 1 else ("row", tuple(flat))


def either(terms: Iterable[Term]) -> Term:
    flat: set[Term] = set()
    for term in terms:
        flat |= term[1] if term[0] == "any" else {term}
    if EVERYTHING in flat:
        return EVERYTHING
    return flat.pop() if len(flat) == 1 else ("any", frozenset(flat))


def both(terms: Iterable[Term]) -> Term:
    flat: set[Term] = set()
    for term in terms:
        flat |= term[1] if term[0] == "both" else {term}
    flat.discard(EVERYTHING)
    if NOTHING in flat:
        return NOTHING
    if not flat:
        return EVERYTHING
    return flat.pop() if len(flat) == 1 else ("both", frozenset(flat))


def without(term: Term) -> Term:
    if term in (NOTHING, EVERYTHING):
        return EVERYTHING if term == NOTHING else NOTHING
    return term[1] if term[0] == "not" else ("not", term)


def times(term: Term, least: int, most: int | None) -> Term:
    """So many in a row; None: any number."""
    if most is not None and most < least:
        return NOTHING
    if most == 0 or term == EMPTY:
        return EMPTY
    if term == NOTHING:
        return NOTHING if least else EMPTY
    return term if least == most == 1 else ("times", term, least, -1 if most is None else most)


def lengths(term: Term) -> tuple[int, float]:
    """No text of the language is shorter than the first, or longer than the second."""
    match term:
        case ("set", _):
            return 1, 1
        case ("row", parts):
            found = [lengths(part) for part in parts]
            return sum(low for low, _ in found), sum(high for _, high in found)
        case ("any", parts):
            found = [lengths(part) for part in parts] or [(0, 0)]
            return min(low for low, _ in found), max(high for _, high in found)
        case ("both", parts):
            found = [lengths(part) for part in parts]
            return max(low for low, _ in found), min(high for _, high in found)
        case ("times", inner, least, most):
            low, high = lengths(inner)
            return low * least, math.inf if most == -1 and high else high * most
    return 0, math.inf


def _may_end(term: Term) -> bool:
    match term:
        case ("row", parts) | ("both", parts):
            return all(map(_may_end, parts))
        case ("any", parts):
            return any(map(_may_end, parts))
        case ("not", inner):
            return not _may_end(inner)
        case ("times", inner, least, _):
            return least == 0 or _may_end(inner)
    return False


def _derived(term: Term, code: int, spend: Callable[[], None]) -> Term:
    """What can follow the character in `term`."""
    spend()
    match term:
        case ("set", ranges):
            return EMPTY if any(low <= code <= high for low, high in ranges) else NOTHING
        case ("row", parts):
            ways = []
            for index, part in enumerate(parts):
                ways.append(row([_derived(part, code, spend), *parts[index + 1 :]]))
                if not _may_end(part):
                    break
            return either(ways)
        case ("any", parts):
            return either([_derived(part, code, spend) for part in parts])
        case ("both", parts):
            return both([_derived(part, code, spend) for part in parts])
        case ("not", inner):
            return without(_derived(inner, code, spend))
        case (_, inner, least, most):
            less = times(inner, max(0, least - 1), None if most == -1 else most - 1)
            return row([_derived(inner, code, spend), less])
    raise ValueError(f"{term[0]} has no derivative")


def matches(term: Term, value: str, spend: Callable[[], None]) -> bool:
    for character in value:
        term = _derived(term, ord(character), spend)
    return _may_end(term)


def regular_to_ebnf(term: Term, rules: Rules, spend: Callable[[], None], writing: Writing = JSON_STRING) -> str | None:
    """A rule for the texts that can be written so; None if there are none. Raises TooManyStates."""
    key = term, id(writing)
    if key not in rules.automata:
        rules.automata[key] = _automaton(term, rules, spend, writing)
    return rules.automata[key]


def _automaton(term: Term, rules: Rules, spend: Callable[[], None], writing: Writing) -> str | None:
    starts = _starts(term, writing)
    moves: dict[Term, dict[Term, list[tuple[int, int]]]] = {}
    waiting = [term]
    while waiting:
        state = waiting.pop()
        if state in moves:
            continue
        if len(moves) >= MAX_STATES:
            raise TooManyStates(f"it needs more than {MAX_STATES} states")
        moves[state] = {}
        for low, end in zip(starts, [*starts[1:], MAX_CODE + 1], strict=True):
            if any(first <= low <= last for first, last in writing.left_out):
                continue
            after = _derived(state, low, spend)
            if after != NOTHING:
                moves[state].setdefault(after, []).append((low, end - 1))
                waiting.append(after)
    alive = _alive(moves)
    if term not in alive:
        return None
    names = {state: rules.reserve("state") for state in moves if state in alive}
    for state, name in names.items():
        ways = [
            f"{written} {names[after]}"
            for after, ranges in moves[state].items()
            if after in alive
            for written in _written(ranges, writing)
        ]
        rules.define(name, " | ".join([*ways, *(['""'] if _may_end(state) else [])]))
    return names[term]


def _starts(term: Term, writing: Writing) -> list[int]:
    """The first code points of the classes of characters between which no part of the term tells a difference."""
    edges = {0, *(edge for low, high in writing.not_plain for edge in (low, high + 1))}
    waiting: list[object] = [term]
    while waiting:
        part = waiting.pop()
        if isinstance(part, frozenset):
            waiting += part
        elif isinstance(part, tuple) and part and part[0] == "set":
            edges |= {edge for low, high in part[1] for edge in (low, high + 1)}
        elif isinstance(part, tuple):
            waiting += part
    return sorted(edge for edge in edges if edge <= MAX_CODE)


def _alive(moves: dict[Term, dict[Term, list[tuple[int, int]]]]) -> set[Term]:
    """The states from which a text can end."""
    before: dict[Term, list[Term]] = {}
    for state, ways in moves.items():
        for after in ways:
            before.setdefault(after, []).append(state)
    alive = {state for state in moves if _may_end(state)}
    waiting = list(alive)
    while waiting:
        for state in before.get(waiting.pop(), ()):
            if state not in alive:
                alive.add(state)
                waiting.append(state)
    return alive


def _written(ranges: list[tuple[int, int]], writing: Writing) -> list[str]:
    """The EBNF of the characters in ranges that begin where the writing tells a difference."""
    escaped = [chr(low) for low, high in ranges if low == high and chr(low) in writing.escapes]
    plain = [(low, high) for low, high in ranges if chr(low) not in escaped]
    return [*(literal(writing.escapes[one]) for one in escaped), *([one_of(plain)] if plain else [])]
