"""Parts of a regular expression, and what of them the runtime could split in many ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from worker_node.grammars.regular import EMPTY, Term, times
from worker_node.grammars.regular import characters as one_of
from worker_node.grammars.regular import either as any_of

Characters = tuple[tuple[int, int], ...]
# Counts are cut here.
_MANY = 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class Open:
    """A repetition of open length, of these characters; `bounded`: with a count."""

    characters: Characters
    bounded: bool

    def blurs(self, other: Open, *, counted: bool = False) -> bool:
        """Whether a text can be split between the two in more than one way, and the runtime keeps count of the ways."""
        return (counted or self.bounded or other.bounded) and any(
            low <= end and start <= high for low, high in self.characters for start, end in other.characters
        )


@dataclass(frozen=True, slots=True)
class Part:
    """`empty`: it may match nothing; `counted`: there is a count inside; `characters`: all that can occur in it,
    `first`: those that can come first. `head` and `tail` are the repetitions of open length that it can begin and end
    with: as they begin, and as they go on; `openings` counts those at its beginning that can be open at once. `term` is
    the language of texts that match in every dialect of regular expressions, `wide` of those that match in any.
    """

    text: str
    empty: bool = False
    counted: bool = False
    characters: Characters = ()
    first: Characters = ()
    head: tuple[Open, ...] = ()
    tail: tuple[Open, ...] = ()
    term: Term = EMPTY
    wide: Term = EMPTY
    openings: int = 0


def part_of(
    text: str, characters: Characters, exact: Iterable[tuple[int, int]] | None = None, wide: Characters | None = None
) -> Part:
    """One character out of these; `exact`: with those that a JSON string does not hold as they are."""
    term = one_of(characters if exact is None else exact)
    return Part(text, characters=characters, first=characters, term=term, wide=term if wide is None else one_of(wide))


def repeated_term(part: Part, least: int, most: int | None) -> tuple[Term, Term]:
    """The languages of so many in a row; `most` None: any number."""
    return times(part.term, least, most), times(part.wide, least, most)


def either(options: list[Part]) -> Part:
    """Any of these."""
    return Part(
        "(" + " | ".join(option.text for option in options) + ")",
        any(option.empty for option in options),
        any(option.counted for option in options),
        _all(option.characters for option in options),
        _all(option.first for option in options),
        tuple(dict.fromkeys(chain.from_iterable(option.head for option in options))),
        tuple(dict.fromkeys(chain.from_iterable(option.tail for option in options))),
        any_of(option.term for option in options),
        any_of(option.wide for option in options),
        min(_MANY, sum(option.openings for option in options)),
    )


def _all(characters: Iterable[Characters]) -> Characters:
    return tuple(dict.fromkeys(chain.from_iterable(characters)))


def size(characters: Iterable[tuple[int, int]]) -> int:
    """How many characters the ranges hold."""
    return sum(high - low + 1 for low, high in characters)


def closing(pattern: str, start: int) -> int | None:
    """Where the parenthesis stands that closes the one before `start`."""
    depth, in_class, position = 1, False, start
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if not depth:
                return position
        position += 1
    return None
