"""Joins parts of an expression, and repeats them, so far as the runtime can follow the result.

The runtime follows every way to split a text among repetitions: 10 characters of `(.{1,20}){2}` keep it busy for
minutes. Where that could happen the first reason is kept in `refusal`; the parts then have their terms still, of which
an automaton can be made, but no text that could be compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from itertools import chain

from worker_node.grammars.ebnf import Rules
from worker_node.grammars.pattern_parts import Characters, Open, Part, either, repeated_term, size
from worker_node.grammars.regular import EMPTY, then
from worker_node.grammars.repetition import repeated

MAX_REPEAT = 1000
MAX_NESTED_REPEAT = 20
MAX_OPENINGS = 16
# From here on a count is made of blocks.
_MANY = 8
_FEW = 16


class PatternJoiner:
    """Combines the parts of one expression; counts are added to `rules`.

    With `references`, parts may be rules: for these the runtime keeps in mind where each began, so that even plain
    repetitions of the same characters must not follow each other.
    """

    def __init__(self, rules: Rules, *, references: bool = False) -> None:
        self._rules = rules
        self._references = references
        self.refusal: str | None = None

    def refuse(self, why: str) -> None:
        """Keep the first reason."""
        self.refusal = self.refusal or why

    def either(self, options: list[Part], place: str) -> Part:
        """Any of these."""
        part = either(options)
        if part.openings > MAX_OPENINGS:
            # Measured: 100 alternatives that begin with a repetition take the runtime 25 s to compile.
            self.refuse(
                f"more than {MAX_OPENINGS} repetitions can be open at the same place, before {place}; let the "
                "alternatives begin with different characters"
            )
        return part

    def joined(self, parts: list[Part], place: str) -> Part:
        """One after the other; `place` tells a reader where that is."""
        first: Characters = ()
        head: tuple[Open, ...] = ()
        tail: tuple[Open, ...] = ()
        empty = True
        openings = 0
        for part in parts:
            self._refuse_blurred(tail, part.head, place, counted=False)
            first += part.first if empty else ()
            head += part.head if empty else ()
            openings += part.openings if empty else 0
            tail = part.tail + (tail if part.empty else ())
            empty = empty and part.empty
        return Part(
            " ".join(part.text for part in parts) or '""',
            empty,
            any(part.counted for part in parts),
            _once(chain.from_iterable(part.characters for part in parts)),
            _once(first),
            tuple(dict.fromkeys(head)),
            tuple(dict.fromkeys(tail)),
            reduce(lambda after, part: then(part.term, after), reversed(parts), EMPTY),
            reduce(lambda after, part: then(part.wide, after), reversed(parts), EMPTY),
            openings,
        )

    def repeated(self, atom: Part, low: int, high: int | None, place: str) -> Part:
        """A part `low` to `high` times (None: any number)."""
        most = max(low, high or 0)
        # A count of a count multiplies: the grammar would grow beyond what can be compiled in time.
        if most > (MAX_NESTED_REPEAT if atom.counted else MAX_REPEAT):
            self.refuse(f"a count above {MAX_REPEAT}, or above {MAX_NESTED_REPEAT} of something that is counted itself")
        if atom.empty and (most > 1 or (high is None and atom.counted)):
            self.refuse(f"a count of something that may be empty, before {place}")
        text = '""' if self.refusal else self._counted(atom.text, low, high)
        empty = low == 0 or atom.empty
        term, wide = repeated_term(atom, low, high)
        more = replace(atom, text=text, empty=empty, counted=most > 1 or atom.counted, term=term, wide=wide)
        more = replace(more, openings=max(atom.openings, int(high != 1)))
        if high == 1:
            # A few letters or more that may be left out, several times in a row, can be split as counts can.
            left_out = (Open(atom.first, bounded=True),) if not low and size(atom.first) > _FEW else ()
            return replace(more, head=(*left_out, *atom.head), tail=(*left_out, *atom.tail))
        self._refuse_blurred(atom.tail, atom.head, place, counted=True)
        if low == high or atom.head or atom.tail:
            return more  # what is open inside is kept apart from itself, so by a character between
        bounded = high is not None
        return replace(more, head=(Open(atom.first, bounded),), tail=(Open(atom.characters, bounded),))

    def _refuse_blurred(self, before: tuple[Open, ...], after: tuple[Open, ...], place: str, *, counted: bool) -> None:
        counted = counted or self._references
        if any(one.blurs(other, counted=counted) for one in before for other in after):
            self.refuse(
                "a repetition follows another one of the same characters, so that a text can be split between them "
                f"in many ways, before {place}; put a fixed other character between them"
            )

    def _counted(self, atom: str, low: int, high: int | None) -> str:
        if max(low, high or 0) < _MANY:
            return f"({atom}){{{low},{'' if high is None else high}}}"
        return f"({repeated(self._rules, self._rules.add('atom', atom), low, high)})"


def _once(characters: Iterable[tuple[int, int]]) -> Characters:
    return tuple(dict.fromkeys(characters))
