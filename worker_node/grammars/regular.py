"""Regular languages with intersection and complement, by derivatives, and as EBNF.

For strings under several conditions: a pattern and a length, keys that match one pattern and not another, texts other
than some constants. The grammar is a deterministic automaton, one rule for each state: a text is derived in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from worker_node.grammars.ebnf import Rules, character_class, literal
from worker_node.grammars.writing import JSON_STRING, Ranges, Writing

MAX_STATES = 256
MAX_CODE = 0x10FFFF
_LAST_ASCII = 0x7F
_EDGES = (0, 0x80, 0x800, 0x1000, 0xD000, 0xD800, 0xE000, 0x1_0000, 0x4_0000, 0x10_0000, MAX_CODE + 1)
_UTF_8 = [(low, end - 1) for low, end in pairwise(_EDGES) if low != 0xD800]

# A kind and its parts: a set of characters, two terms in a row, any or both of some, none of one, a repetition (with
# -1 for no most). Equal terms are equal languages, so far as the functions here can tell.
Term = tuple[Any, ...]

NOTHING: Term = ("any", frozenset())
EMPTY: Term = ("empty",)
_ALL: Ranges = ((0, MAX_CODE),)


class TooManyStates(ValueError):
    """The automaton is larger than is worth compiling."""


def characters(ranges: Iterable[tuple[int, int]]) -> Term:
    """One character out of these ranges of code points."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return ("set", tuple(merged)) if merged else NOTHING


def text(value: str) -> Term:
    """Exactly this text."""
    term = EMPTY
    for character in reversed(value):
        term = then(("set", ((ord(character), ord(character)),)), term)
    return term


def then(first: Term, second: Term) -> Term:
    """One after the other."""
    if NOTHING in (first, second):  # in a set, both would be hashed
        return NOTHING
    if first == EMPTY:
        return second
    if second == EMPTY:
        return first
    parts = []
    while first[0] == "cat":  # to the right, so that equal states look equal
        parts.append(first[1])
        first = first[2]
    term = ("cat", first, second)
    for part in reversed(parts):
        term = ("cat", part, term)
    return term


def either(terms: Iterable[Term]) -> Term:
    """Any of these."""
    flat: set[Term] = set()
    for term in terms:
        flat |= term[1] if term[0] == "any" else {term}
    if EVERYTHING in flat:
        return EVERYTHING
    return flat.pop() if len(flat) == 1 else ("any", frozenset(flat))


def both(terms: Iterable[Term]) -> Term:
    """What is in all of these."""
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
    """Every text but these."""
    if term == NOTHING:
        return EVERYTHING
    if term == EVERYTHING:
        return NOTHING
    return term[1] if term[0] == "not" else ("not", term)


def times(term: Term, least: int, most: int | None) -> Term:
    """So many in a row; None: any number."""
    if most is not None and most < least:
        return NOTHING
    if most == 0 or term == EMPTY:
        return EMPTY
    if term == NOTHING:
        return NOTHING if least else EMPTY
    if least == most == 1:
        return term
    return ("times", term, least, -1 if most is None else most)


ANY_CHARACTER: Term = ("set", _ALL)
EVERYTHING: Term = ("times", ANY_CHARACTER, 0, -1)


def _may_end(term: Term) -> bool:
    kind: str = term[0]
    if kind == "cat":
        return bool(_may_end(term[1]) and _may_end(term[2]))
    if kind == "any":
        return any(map(_may_end, term[1]))
    if kind == "both":
        return all(map(_may_end, term[1]))
    if kind == "not":
        return not _may_end(term[1])
    if kind == "times":
        return bool(term[2] == 0 or _may_end(term[1]))
    return kind == "empty"


def _derived(term: Term, code: int, spend: Callable[[], None]) -> Term:  # noqa: PLR0911  # one for each kind
    """What can follow the character in `term`."""
    spend()
    match term:
        case ("set", ranges):
            return EMPTY if any(low <= code <= high for low, high in ranges) else NOTHING
        case ("cat", first, second):
            after = then(_derived(first, code, spend), second)
            return either([after, _derived(second, code, spend)]) if _may_end(first) else after
        case ("any", terms):
            return either([_derived(one, code, spend) for one in terms])
        case ("both", terms):
            return both([_derived(one, code, spend) for one in terms])
        case ("not", inner):
            return without(_derived(inner, code, spend))
        case ("times", inner, least, most):
            less = times(inner, max(0, least - 1), None if most == -1 else most - 1)
            return then(_derived(inner, code, spend), less)
    return NOTHING


def matches(term: Term, value: str, spend: Callable[[], None]) -> bool:
    """Whether the text is in the language."""
    for character in value:
        term = _derived(term, ord(character), spend)
    return _may_end(term)


def regular_to_ebnf(term: Term, rules: Rules, spend: Callable[[], None], writing: Writing = JSON_STRING) -> str | None:
    """The name of a rule for the language, inside a JSON string without the quotes or otherwise written; None if it is
    empty.

    Texts with characters that the writing leaves out are left out. Raises TooManyStates.
    """
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
            if writing.leaves_out(low):
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
        parts = [
            f"{written} {names[after]}"
            for after, ranges in moves[state].items()
            if after in alive
            for written in _classes(ranges, writing)
        ]
        rules.define(name, " | ".join([*parts, *(['""'] if _may_end(state) else [])]))
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
            waiting += part[1:]
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


def _classes(ranges: list[tuple[int, int]], writing: Writing) -> list[str]:
    """The EBNF of the characters in ranges that are apart and in order."""
    escaped = [chr(low) for low, high in ranges if low == high and chr(low) in writing.escapes]
    written = [literal(writing.escapes[character]) for character in escaped]
    plain = [(low, high) for low, high in ranges if chr(low) not in escaped]
    if not plain:
        return written
    return [*written, one_of(plain)]


def one_of(ranges: Iterable[tuple[int, int]]) -> str:
    """The EBNF of one character out of ranges, of which there is at least one, as it stands."""
    joined: Ranges = characters(ranges)[1]
    if len(joined) == 1 and joined[0][0] == joined[0][1]:
        return literal(chr(joined[0][0]))
    if joined[-1][1] == MAX_CODE and joined[-1][0] <= _LAST_ASCII + 1:
        # The runtime reads a negated class right only if what it names is ASCII.
        gaps = zip([(0, -1), *joined[:-1]], joined, strict=True)
        return character_class([(one[1] + 1, other[0] - 1) for one, other in gaps], negated=True)
    return character_class([part for low, high in joined for part in _encoded(low, high)])


def _encoded(low: int, high: int) -> list[tuple[int, int]]:
    """A range, cut where UTF-8 takes another form and without surrogates, which are no characters.

    A range over such an edge lets the runtime write bytes that no character begins with.
    """
    parts = [(max(low, start), min(high, end)) for start, end in _UTF_8]
    return [(start, end) for start, end in parts if start <= end] or [(low, high)]
