"""Which line of a TOML file sets a key: Python's parser returns values without positions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any

_LINE = re.compile(r"\bline (\d+)")

Path = Sequence[str | int]


def error_line(error: tomllib.TOMLDecodeError, text: str) -> int:
    """The line, counted from 1, where the parser gave up; the last one when the text ends too early."""
    found = _LINE.search(str(error))
    return int(found[1]) if found else max(1, len(text.splitlines()))


def known_part(document: Any, path: Path) -> tuple[str | int, ...]:
    """The elements of `path` that lead into `document`; the others are left out (tags, names of missing keys)."""
    known: list[str | int] = []
    for element in path:
        if not _holds(document, element):
            continue
        document = document[element]
        known.append(element)
    return tuple(known)


def line_of(text: str, path: Path) -> int:
    """The line, counted from 1, of the statement that sets `path`, which must be a path into the parsed text.

    A value within an array or an inline table has the line of the statement's beginning. Parses O(log n) beginnings of
    the text: the shortest one that holds the path ends with the statement.
    """
    lines = text.splitlines(keepends=True)
    if not path:
        return 1
    # Invariant: the first `without` lines are valid TOML without the path, and the first `held` lines hold it.
    without, held = 0, len(lines)
    while held - without > 1:
        middle = (without + held) // 2
        end, document = _parsed_up_to(lines, without, middle)
        if document is not None and known_part(document, path) == tuple(path):
            held = end
        elif end > without:
            without = end
        else:
            # Nothing between `without` and `middle` is valid: one statement spans it. Look behind `middle`.
            end, document = _parsed_from(lines, middle, held)
            if known_part(document, path) == tuple(path):
                break
            without = end
    return without + 1 + _leading_comments(lines[without:held])


def _parsed_up_to(lines: Sequence[str], lowest: int, count: int) -> tuple[int, Any]:
    """The longest valid beginning of at most `count` lines and more than `lowest`, parsed; else (lowest, None)."""
    for end in range(count, lowest, -1):
        if (document := _parse(lines[:end])) is not None:
            return end, document
    return lowest, None


def _parsed_from(lines: Sequence[str], count: int, highest: int) -> tuple[int, Any]:
    """The shortest valid beginning of more than `count` lines; the one of `highest` lines is known to be valid."""
    for end in range(count + 1, highest):
        if (document := _parse(lines[:end])) is not None:
            return end, document
    return highest, _parse(lines[:highest])


def _parse(lines: Sequence[str]) -> Any:
    try:
        return tomllib.loads("".join(lines))
    except tomllib.TOMLDecodeError:
        return None


def _leading_comments(lines: Sequence[str]) -> int:
    """How many lines without a statement come first."""
    for count, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            return count
    return 0


def _holds(document: Any, element: str | int) -> bool:
    if isinstance(element, int):
        return isinstance(document, list) and 0 <= element < len(document)
    return isinstance(document, dict) and element in document
