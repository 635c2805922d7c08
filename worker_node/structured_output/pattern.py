"""A regular expression to EBNF, for the inside of a JSON string or for a text of its own.

The subset that means the same in every dialect of regular expressions: literals, `.`, classes, groups, alternation,
counts, and conditions on what follows. An expression is read as a term of `regular`. It is written as it stands where
the next character always tells how to go on (`_Deterministic`), else as an automaton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from worker_node.structured_output.ebnf import (
    JSON_STRING,
    Ranges,
    Rules,
    Writing,
    complement,
    merged_ranges,
    one_of,
    one_text,
)
from worker_node.structured_output.regular import (
    EMPTY,
    EVERYTHING,
    NOTHING,
    Term,
    TooManyStates,
    both,
    characters,
    either,
    regular_to_ebnf,
    row,
    text,
    times,
    without,
)

MAX_PATTERN_CHARACTERS = 1000
_MAX_DEPTH = 50
_MAX_REPEAT = 1000
_MAX_NESTED_REPEAT = 20
# From here on a count is made of blocks.
_MANY = 8


class PatternRefused(ValueError):
    """The expression is wrong, or uses what cannot be turned into a grammar."""


def term_to_ebnf(term: Term, rules: Rules, spend: Callable[[], None], writing: Writing = JSON_STRING) -> str | None:
    """The EBNF of a term as it stands, or of its automaton; None if it is empty. Raises PatternRefused."""
    if term == NOTHING:
        return None
    try:
        return _Deterministic(rules, spend, writing).of(term)
    except _Ambiguous as reason:
        try:
            return regular_to_ebnf(term, rules, spend, writing)
        except TooManyStates as error:
            raise PatternRefused(f"{reason}; as an automaton {error}") from None


@lru_cache(maxsize=256)
def pattern_term(pattern: str, *, search: bool) -> Term:
    """What matches as a whole or, with `search`, in a part, in every dialect. Raises PatternRefused."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise PatternRefused(f"it has {len(pattern)} characters, the bound here is {MAX_PATTERN_CHARACTERS}")
    around = EVERYTHING if search else EMPTY
    return _Parser(pattern, _Context(around, around, wide=False)).whole()


class _CharacterSet(NamedTuple):
    """The characters that are in the set in every dialect, and in any."""

    sure: list[tuple[int, int]]
    wide: list[tuple[int, int]]

    def inverted(self) -> _CharacterSet:
        return _CharacterSet(complement(self.wide), complement(self.sure))


# Dialects differ in which characters beyond ASCII are digits, letters or blanks. Latin, Greek and Cyrillic letters,
# kana, the ideographs in common use and Hangul hold no digits.
_DIGITS = [(0x30, 0x39)]
_NO_DIGITS = [(0, 0x7F), (0xC0, 0x52F), (0x3040, 0x33FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
_LETTERS = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_BLANKS = [(0x09, 0x0D), (0x20, 0x20)]
_SOME_BLANKS = [(0x1C, 0x1F), (0x2000, 0x200B), (0x2028, 0x2029), (0x205F, 0x2060)]
_SOME_BLANKS += [(code, code) for code in (0x85, 0xA0, 0x1680, 0x180E, 0x202F, 0x3000, 0xFEFF)]
_POSITIVE = {
    "d": _CharacterSet(_DIGITS, [*_DIGITS, *complement(_NO_DIGITS)]),
    "w": _CharacterSet(_LETTERS, [*_LETTERS, *complement([(0, 0x7F)])]),
    "s": _CharacterSet(_BLANKS, [*_BLANKS, *_SOME_BLANKS]),
}
# What follows the backslash.
_NAMED = _POSITIVE | {letter.upper(): named.inverted() for letter, named in _POSITIVE.items()}
# All but the ends of lines, which differ between dialects.
_DOT = _CharacterSet(complement([(0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029)]), complement([]))
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
# In some dialects `$` is also before a last end of line.
_WIDE_END = either([EMPTY, text("\n")])


class _Context(NamedTuple):
    """What may stand around an expression where it does not say `^` and `$`, and whether any dialect's meaning counts.

    In a condition on what follows, `end` closes it, and `^` holds only if it stands at the start.
    """

    before: Term
    after: Term
    wide: bool
    may_begin: bool = True
    end: str = ""


class _Parser:
    """Reads one expression."""

    def __init__(self, pattern: str, context: _Context) -> None:
        self._text = pattern
        self._position = 0
        self._depth = 0
        self._context = context

    def whole(self) -> Term:
        term = self._alternatives(self._top_row)
        if self._position < len(self._text):
            raise PatternRefused(f"unexpected {self._peek()!r} at position {self._position}")
        return term

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise PatternRefused("the expression ends too early")
        self._position += 1
        return character

    def _accept(self, part: str) -> bool:
        found = self._text.startswith(part, self._position)
        self._position += len(part) * found
        return found

    def _alternatives(self, option: Callable[[], Term]) -> Term:
        options = [option()]
        while self._accept("|"):
            options.append(option())
        return either(options)

    def _row(self) -> Term:
        parts = []
        while self._peek() not in {"", "|", ")"}:
            parts.append(self._repeated(self._atom()))
        return row(parts)

    def _top_row(self) -> Term:
        context = self._context
        begun = context.may_begin and self._accept("^")
        after = context.after
        items: list[tuple[Term, bool]] = []
        while self._peek() not in {"", "|", ")"}:
            if self._peek() == "$" and self._text[self._position + 1 : self._position + 2] in {"", "|", context.end}:
                self._take()
                after = _WIDE_END if context.wide else EMPTY
                break
            if self._text.startswith(("(?=", "(?!"), self._position):
                items.append((self._ahead(at_start=not items and (begun or context.before == EMPTY)), True))
            else:
                items.append((self._repeated(self._atom()), False))
        for term, is_condition in reversed(items):
            after = both([after, term]) if is_condition else row([term, after])
        # What is searched for may have anything before it.
        return after if begun else row([context.before, after])

    def _ahead(self, *, at_start: bool) -> Term:
        """The texts that meet a condition on all that follows."""
        self._position += 2
        inverted = self._take() == "!"
        outside = self._context
        self._context = _Context(EMPTY, EVERYTHING, outside.wide != inverted, at_start, end=")")
        term = self._closed(self._top_row)
        self._context = outside
        return without(term) if inverted else term

    def _atom(self) -> Term:
        character = self._take()
        match character:
            case "(":
                if self._accept("?") and not self._accept(":"):
                    raise PatternRefused(f"a group with (?{self._peek()} at position {self._position}")
                return self._closed(self._row)
            case "[":
                return self._class()
            case ".":
                return self._set(_DOT)
            case "\\":
                found = self._escaped()
                return self._set(found) if isinstance(found, _CharacterSet) else text(found)
            case "^" | "$":
                raise PatternRefused(f"{character} in the middle, at position {self._position - 1}")
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise PatternRefused(f"unexpected {character!r} at position {self._position - 1}")
        return text(character)

    def _closed(self, option: Callable[[], Term]) -> Term:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternRefused("groups are nested too deeply")
        inner = self._alternatives(option)
        self._depth -= 1
        if not self._accept(")"):
            raise PatternRefused("a group is not closed")
        return inner

    def _escaped(self) -> str | _CharacterSet:
        character = self._take()
        if character in _NAMED:
            return _NAMED[character]
        if character in _CONTROL:
            return _CONTROL[character]
        if character.isalnum():
            raise PatternRefused(f"\\{character}")
        return character

    def _set(self, wanted: _CharacterSet) -> Term:
        return characters(wanted.wide if self._context.wide else wanted.sure)

    def _class(self) -> Term:
        inverted = self._accept("^")
        members: list[_CharacterSet] = []
        while not self._accept("]"):
            members.append(self._class_member())
        found = _CharacterSet(
            [one for each in members for one in each.sure], [one for each in members for one in each.wide]
        )
        return self._set(found.inverted() if inverted else found)

    def _class_member(self) -> _CharacterSet:
        low = self._class_character()
        if isinstance(low, _CharacterSet):
            return low
        high: str | _CharacterSet = low
        if self._peek() == "-" and self._text[self._position + 1 : self._position + 2] not in {"]", ""}:
            self._take()
            high = self._class_character()
        if isinstance(high, _CharacterSet) or high < low:
            raise PatternRefused(f"a range that is none, at position {self._position}")
        return _CharacterSet([(ord(low), ord(high))], [(ord(low), ord(high))])

    def _class_character(self) -> str | _CharacterSet:
        character = self._take()
        if character == "[":
            raise PatternRefused("a [ inside a class; write \\[")
        return self._escaped() if character == "\\" else character

    def _repeated(self, atom: Term) -> Term:
        if self._accept("{"):
            low, high = self._counts()
        elif self._accept("*"):
            low, high = 0, None
        elif self._accept("+"):
            low, high = 1, None
        elif self._accept("?"):
            low, high = 0, 1
        else:
            return atom
        if self._peek() in {"*", "+", "{"}:
            raise PatternRefused(f"two counts in a row at position {self._position}")
        self._accept("?")  # lazy or not, the same texts match
        return times(atom, low, high)

    def _counts(self) -> tuple[int, int | None]:
        body, closed, _ = self._text[self._position :].partition("}")
        low, comma, high = body.partition(",")
        if not closed or not low.isdecimal() or not (high == "" or high.isdecimal()) or len(body) > 12:
            raise PatternRefused(f"a count that is none, at position {self._position}")
        self._position += len(body) + 1
        least = int(low)
        most = least if not comma else (int(high) if high else None)
        if most is not None and most < least:
            raise PatternRefused("a count whose limits are the wrong way round")
        return least, most


class _Ambiguous(Exception):
    """The next character does not tell how a term goes on, or a count is too large."""


class _Deterministic:
    """Writes terms as they stand, if at each place the next character tells how to go on.

    The runtime follows every way to split a text among repetitions (10 characters of `(.{1,20}){2}` keep it busy for
    minutes), and mixes up alternatives that begin alike.
    """

    def __init__(self, rules: Rules, spend: Callable[[], None], writing: Writing) -> None:
        self._rules = rules
        self._spend = spend
        self._writing = writing

    def of(self, term: Term, following: Ranges = ()) -> str:
        """The EBNF of a term, where one of the `following` characters, or the end, comes next. Raises _Ambiguous."""
        self._spend()
        match term:
            case ("set", ranges):
                return self._set(ranges)
            case ("row", terms):
                parts = []
                for part in reversed(terms):
                    parts.append(self.of(part, following))
                    first, empty = _first(part)
                    following = [*first, *(following if empty else ())]
                return " ".join(reversed(parts)) or '""'
            case ("any", terms):
                # In an order of their own: a set has another in each process.
                options = sorted(terms, key=repr)
                firsts = [*map(_first, options)]
                nexts = sorted(one for first, empty in firsts for one in (*first, *(following if empty else ())))
                if sum(empty for _, empty in firsts) > 1 or any(low <= end for (_, end), (low, _) in pairwise(nexts)):
                    raise _Ambiguous("alternatives begin with the same character")
                return "(" + " | ".join(self.of(option, following) for option in options) + ")"
            case ("times", inner, least, most):
                return self._times(inner, least, None if most == -1 else most, following)
        raise _Ambiguous("a condition on what follows can be enforced by an automaton only")

    def _set(self, ranges: Ranges) -> str:
        if plain := self._writing.plain(ranges):
            return one_of(plain)
        escapes = self._writing.escapes
        options = [escapes[chr(low)] for low, high in ranges if low == high and chr(low) in escapes]
        if not options:
            raise PatternRefused("a control character, or a class of nothing else, cannot be written")
        return f"({one_text(options)})"

    def _times(self, inner: Term, least: int, most: int | None, following: Ranges) -> str:
        first, empty = _first(inner)
        count = max(least, most or 0)
        if count > (_MAX_NESTED_REPEAT if _counts(inner) else _MAX_REPEAT):
            raise _Ambiguous(
                f"a count above {_MAX_REPEAT}, or above {_MAX_NESTED_REPEAT} of something that is counted itself"
            )
        follow_alike = any(low <= end and start <= high for low, high in first for start, end in following)
        if empty or (least != most and follow_alike):
            raise _Ambiguous(
                "a repetition may be followed by the same characters, so that a text can be split between them in "
                "many ways; put a fixed other character between them"
            )
        text = self.of(inner, [*first, *following] if most != 1 else following)
        if count < _MANY:
            return f"({text}){{{least},{'' if most is None else most}}}"
        return f"({self._rules.repeated(self._rules.add('atom', text), least, most)})"


@lru_cache(maxsize=4096)
def _first(term: Term) -> tuple[tuple[tuple[int, int], ...], bool]:
    """The characters that a term can begin with, and whether it may be empty."""
    match term:
        case ("set", ranges):
            return tuple(ranges), False
        case ("row", parts):
            found: list[tuple[int, int]] = []
            for part in parts:
                first, empty = _first(part)
                found += first
                if not empty:
                    return merged_ranges(found), False
            return merged_ranges(found), True
        case ("any", parts):
            firsts = [*map(_first, parts)]
            return merged_ranges(one for first, _ in firsts for one in first), any(empty for _, empty in firsts)
        case ("times", inner, least, _):
            first, empty = _first(inner)
            return first, empty or least == 0
    raise _Ambiguous("a condition on what follows can be enforced by an automaton only")


def _counts(term: Term) -> bool:
    """Whether there is a count in a term."""
    match term:
        case ("row", parts) | ("any", parts):
            return any(map(_counts, parts))
        case ("times", inner, least, most):
            return max(least, most) > 1 or _counts(inner)
    return False
