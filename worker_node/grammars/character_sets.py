"""Sets of characters, and those that dialects of regular expressions give a letter: `\\d`, `\\w`, `\\s`, `.`.

Dialects differ in which characters beyond ASCII are digits, letters or blanks, so each set has those that it holds in
every dialect, and those that it holds in some.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from worker_node.grammars.regular import MAX_CODE

Ranges = list[tuple[int, int]]

_DIGITS = [(0x30, 0x39)]
_LETTERS = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_BLANKS = [(0x09, 0x0D), (0x20, 0x20)]
# Latin, Greek and Cyrillic letters, kana, the ideographs in common use and Hangul hold no digits.
_NO_DIGITS = [(0xC0, 0x52F), (0x3040, 0x33FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
_SOME_BLANKS = [
    (0x1C, 0x1F),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x180E, 0x180E),
    (0x2000, 0x200B),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x2060),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
]
ENDS_OF_LINES = [(0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029)]


class CharacterSet(NamedTuple):
    """The characters that are in the set in every dialect, and in any."""

    sure: Ranges
    widest: Ranges

    def inverted(self) -> CharacterSet:
        """All other characters."""
        return CharacterSet(complement(self.widest), complement(self.sure))


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The characters that are in none of the ranges."""
    found = []
    start = 0
    for low, high in sorted(ranges):
        if start < low:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, MAX_CODE)] if start <= MAX_CODE else found


def one(code: int) -> CharacterSet:
    """A single character."""
    return CharacterSet([(code, code)], [(code, code)])


def united(sets: Iterable[CharacterSet]) -> CharacterSet:
    """What is in any of the sets."""
    sets = list(sets)
    return CharacterSet([part for each in sets for part in each.sure], [part for each in sets for part in each.widest])


_BEYOND_ASCII = [(0x80, MAX_CODE)]
_POSITIVE = {
    "d": CharacterSet(_DIGITS, [*_DIGITS, *complement([(0, 0x7F), *_NO_DIGITS])]),
    "w": CharacterSet(_LETTERS, [*_LETTERS, *_BEYOND_ASCII]),
    "s": CharacterSet(_BLANKS, [*_BLANKS, *_SOME_BLANKS]),
}
# What follows the backslash.
NAMED = _POSITIVE | {letter.upper(): named.inverted() for letter, named in _POSITIVE.items()}
# All but the ends of lines, of which dialects know different ones.
DOT = CharacterSet(complement(ENDS_OF_LINES), [(0, MAX_CODE)])
