"""Parts of a regular expression, and what of them the runtime could split in many ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

Characters = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
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
    with: as they begin, and as they go on.
    """

    text: str
    empty: bool = False
    counted: bool = False
    characters: Characters = ()
    first: Characters = ()
    head: tuple[Open, ...] = ()
    tail: tuple[Open, ...] = ()


def part_of(text: str, characters: Characters) -> Part:
    """One character out of these."""
    return Part(text, characters=characters, first=characters)


def either(options: list[Part]) -> Part:
    """Any of these."""
    return Part(
        "(" + " | ".join(option.text for option in options) + ")",
        any(option.empty for option in options),
        any(option.counted for option in options),
        _all(option.characters for option in options),
        _all(option.first for option in options),
        tuple(chain.from_iterable(option.head for option in options)),
        tuple(chain.from_iterable(option.tail for option in options)),
    )


def _all(characters: Iterable[Characters]) -> Characters:
    return tuple(dict.fromkeys(chain.from_iterable(characters)))
