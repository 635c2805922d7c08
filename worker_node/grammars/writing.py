"""How the characters of a text stand in an answer: inside a JSON string, or as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker_node.grammars.ebnf import literal

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Writing:
    """`escapes` are characters that are written as several; those in `left_out` are never written otherwise."""

    left_out: Ranges
    escapes: Mapping[str, str]

    @property
    def not_plain(self) -> list[tuple[int, int]]:
        """The characters that cannot stand as they are: no class produces them."""
        return sorted(
            {*self.left_out, *((ord(one), ord(one)) for one in self.escapes if not self.leaves_out(ord(one)))}
        )

    def leaves_out(self, code: int) -> bool:
        """Whether a class or an automaton leaves this character out."""
        return any(low <= code <= high for low, high in self.left_out)

    def written(self, character: str) -> str | None:
        """The EBNF of one character; None for one that cannot be written."""
        if character in self.escapes:
            return literal(self.escapes[character])
        return None if self.leaves_out(ord(character)) else literal(character)

    def plain(self, low: int, high: int) -> list[tuple[int, int]]:
        """The characters of a range that can stand as they are."""
        parts = []
        for start, end in self.not_plain:
            if low < start:
                parts.append((low, min(high, start - 1)))
            low = max(low, end + 1)
            if low > high:
                return parts
        return [*parts, (low, high)]


JSON_STRING = Writing(((0x00, 0x1F),), {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\f": "\\f", '"': '\\"', "\\": "\\\\"})
# The runtime's grammars hold no control characters but those of white space.
AS_IT_IS = Writing(((0x00, 0x08), (0x0B, 0x0C), (0x0E, 0x1F), (0x7F, 0x7F)), {})
