"""Characters that cannot stand for themselves in a JSON string."""

from __future__ import annotations

Ranges = list[tuple[int, int]]
# What cannot stand in a JSON string as it is: a class or dot does not produce it.
UNWRITABLE = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]


def without_unwritable(low: int, high: int) -> Ranges:
    """The parts of the range that can be written as they are."""
    parts: Ranges = []
    for start, end in UNWRITABLE:
        if low < start:
            parts.append((low, min(high, start - 1)))
        low = max(low, end + 1)
        if low > high:
            return parts
    return [*parts, (low, high)]
