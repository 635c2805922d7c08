"""A regular expression to EBNF, for the inside of a JSON string or for a text of its own.

The subset that means the same in every dialect of regular expressions: literals, `.`, classes, groups, alternation,
counts, and conditions on what follows. An expression is read as a term of `regular`. It is written as it stands where
the runtime can follow it (`_Parts`), else as an automaton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, groupby
from typing import NamedTuple

from worker_node.structured_output.ebnf import (
    JSON_STRING,
    Ranges,
    Rules,
    Writing,
    complement,
    literal,
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
_MAX_OPENINGS = 16
# From here on a count is made of blocks, and a part that may be left out is as hard to split as a count.
_MANY = 8
_FEW = 16


class PatternRefused(ValueError):
    """The expression is wrong, or uses what cannot be turned into a grammar."""


def term_to_ebnf(term: Term, rules: Rules, spend: Callable[[], None], writing: Writing = JSON_STRING) -> str | None:
    """The EBNF of a language as its term stands, or of its automaton; None if it is empty. Rules are added to `rules`.

    Raises PatternRefused.
    """
    if term == NOTHING:
        return None
    parts = _Parts(rules, spend, writing)
    part = parts.of(term)
    if parts.refusal is None:
        return part.text
    try:
        return regular_to_ebnf(term, rules, spend, writing)
    except TooManyStates as error:
        raise PatternRefused(f"{parts.refusal}; as an automaton {error}") from None


@lru_cache(maxsize=256)
def pattern_term(pattern: str, *, search: bool, wide: bool = False, most: int = MAX_PATTERN_CHARACTERS) -> Term:
    """The texts that match as a whole or, with `search`, those in which the expression is found.

    They match in every dialect of regular expressions, or, `wide`, in any of them. Raises PatternRefused.
    """
    if len(pattern) > most:
        raise PatternRefused(f"it has {len(pattern)} characters, the bound here is {most}")
    around = EVERYTHING if search else EMPTY
    return _Parser(pattern, _Context(around, around, wide)).whole()


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
# All but the ends of lines, of which dialects know different ones.
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
                return self._group()
            case "[":
                return self._class()
            case ".":
                return self._set(_DOT)
            case "\\":
                return self._escape()
            case "^" | "$":
                raise PatternRefused(f"{character} in the middle, at position {self._position - 1}")
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise PatternRefused(f"unexpected {character!r} at position {self._position - 1}")
        return text(character)

    def _group(self) -> Term:
        if self._accept("?") and not self._accept(":"):
            raise PatternRefused(f"a group with (?{self._peek()} at position {self._position}")
        return self._closed(self._row)

    def _closed(self, option: Callable[[], Term]) -> Term:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternRefused("groups are nested too deeply")
        inner = self._alternatives(option)
        self._depth -= 1
        if not self._accept(")"):
            raise PatternRefused("a group is not closed")
        return inner

    def _escape(self) -> Term:
        found = self._escaped()
        return self._set(found) if isinstance(found, _CharacterSet) else text(found)

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


_Characters = frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Open:
    """A repetition of open length, of these characters; `bounded`: with a count."""

    characters: _Characters
    bounded: bool

    def blurs(self, other: _Open, *, counted: bool) -> bool:
        """Whether a text can be split between the two in more than one way, and the runtime keeps count of the ways."""
        return (counted or self.bounded or other.bounded) and any(
            low <= end and start <= high for low, high in self.characters for start, end in other.characters
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The EBNF of a part of an expression, and what of it the runtime could split in many ways.

    `empty`: it may match nothing; `counted`: there is a count inside; `characters`: all that can occur in it, `first`:
    those that can come first. `head` and `tail` are the repetitions of open length that it can begin and end with: as
    they begin, and as they go on; `openings` counts those at its beginning that can be open at once. `alike`: it is a
    choice of parts two of which can begin with the same character.
    """

    text: str
    empty: bool = False
    counted: bool = False
    characters: _Characters = frozenset()
    first: _Characters = frozenset()
    head: frozenset[_Open] = frozenset()
    tail: frozenset[_Open] = frozenset()
    openings: int = 0
    alike: bool = False

    def begins_as(self, other: _Part) -> bool:
        """Whether a character can begin both."""
        return any(low <= end and start <= high for low, high in self.first for start, end in other.first)


class _Parts:
    """Writes terms as they stand, so far as the runtime can follow the result; counts are added to `rules`.

    The runtime follows every way to split a text among repetitions: 10 characters of `(.{1,20}){2}` keep it busy for
    minutes. Where that could happen the first reason is kept in `refusal`, and the result is of no use.
    """

    def __init__(self, rules: Rules, spend: Callable[[], None], writing: Writing) -> None:
        self._rules = rules
        self._spend = spend
        self._writing = writing
        self.refusal: str | None = None

    def _refuse(self, why: str) -> None:
        self.refusal = self.refusal or why

    def of(self, term: Term) -> _Part:
        """The part of a term."""
        match term:
            case ("set", ranges):
                return self._set(ranges)
            case ("row", terms):
                runs = groupby(terms, _is_character)
                return self._row(
                    part for fixed, run in runs for part in ([self._literal(run)] if fixed else map(self.of, run))
                )
            case ("any", terms):
                # In an order of their own: a set has another in each process.
                return self._told_apart(term, self._either([self.of(one) for one in sorted(terms, key=repr)]))
            case ("times", inner, least, most):
                return self._times(self.of(inner), least, None if most == -1 else most)
        self._refuse("a condition on what follows can be enforced by an automaton only")
        return _Part('""')

    def _set(self, ranges: Ranges) -> _Part:
        plain = frozenset(self._writing.plain(ranges))
        if not plain:
            options = [chr(low) for low, high in ranges if low == high and self._writing.written(chr(low)) is not None]
            if not options:
                raise PatternRefused("a control character, or a class of nothing else, cannot be written")
            codes = frozenset((ord(one), ord(one)) for one in options)
            written = one_text(self._writing.escapes[one] for one in options)
            return _Part(f"({written})", characters=codes, first=codes)
        return _Part(one_of(plain), characters=plain, first=plain)

    def _literal(self, terms: Iterable[Term]) -> _Part:
        codes = tuple(ranges[0] for _, ranges in terms)
        written = [self._writing.written(chr(code)) for code, _ in codes]
        if None in written:
            raise PatternRefused("a control character cannot be written")
        return _Part(literal("".join(map(str, written))), characters=frozenset(codes), first=frozenset(codes[:1]))

    def _either(self, options: list[_Part]) -> _Part:
        openings = sum(option.openings for option in options)
        if openings > _MAX_OPENINGS:
            # Measured: 100 alternatives that begin with a repetition take the runtime 25 s to compile.
            self._refuse(
                f"more than {_MAX_OPENINGS} repetitions can be open at the same place; let the alternatives begin with "
                "different characters"
            )
        if len(options) == 1:
            return options[0]
        return _Part(
            "(" + " | ".join(option.text for option in options) + ")",
            any(option.empty for option in options),
            any(option.counted for option in options),
            frozenset().union(*(option.characters for option in options)),
            frozenset().union(*(option.first for option in options)),
            frozenset().union(*(option.head for option in options)),
            frozenset().union(*(option.tail for option in options)),
            openings,
            alike=any(one.begins_as(other) for one, other in combinations(options, 2)),
        )

    def _told_apart(self, term: Term, part: _Part) -> _Part:
        """The part itself, or an automaton where two alternatives begin alike: the runtime would mix them up."""
        if self.refusal or not part.alike:
            return part
        try:
            name = regular_to_ebnf(term, self._rules, self._spend, self._writing)
        except TooManyStates as error:
            self._refuse(f"alternatives that begin with the same character, and as an automaton {error}")
            return part
        return replace(part, text=name or '""', alike=False)

    def _row(self, parts: Iterable[_Part]) -> _Part:
        texts: list[str] = []
        whole = _Part("", empty=True)
        for part in parts:
            self._refuse_blurred(whole.tail, part.head, counted=False)
            texts.append(part.text)
            whole = _Part(
                "",
                whole.empty and part.empty,
                whole.counted or part.counted,
                whole.characters | part.characters,
                whole.first | part.first if whole.empty else whole.first,
                whole.head | part.head if whole.empty else whole.head,
                whole.tail | part.tail if part.empty else part.tail,
                whole.openings + part.openings if whole.empty else whole.openings,
            )
        return replace(whole, text=" ".join(texts) or '""')

    def _times(self, inner: _Part, low: int, high: int | None) -> _Part:
        most = max(low, high or 0)
        # A count of a count multiplies: the grammar would grow beyond what can be compiled in time.
        if most > (_MAX_NESTED_REPEAT if inner.counted else _MAX_REPEAT):
            self._refuse(
                f"a count above {_MAX_REPEAT}, or above {_MAX_NESTED_REPEAT} of something that is counted itself"
            )
        if inner.empty and (most > 1 or (high is None and inner.counted)):
            self._refuse("a count of something that may be empty")
        part = replace(
            inner,
            text='""' if self.refusal else self._counted(inner.text, low, high),
            empty=low == 0 or inner.empty,
            counted=most > 1 or inner.counted,
            openings=max(inner.openings, int(high != 1)),
        )
        if high == 1:
            # A few letters or more that may be left out, several times in a row, can be split as counts can.
            size = sum(last - first + 1 for first, last in inner.first)
            left_out = {_Open(inner.first, bounded=True)} if not low and size > _FEW else set()
            return replace(part, head=inner.head | left_out, tail=inner.tail | left_out)
        self._refuse_blurred(inner.tail, inner.head, counted=True)
        if low == high or inner.head or inner.tail:
            return part  # what is open inside is kept apart from itself, so by a character between
        bounded = high is not None
        head, tail = _Open(inner.first, bounded), _Open(inner.characters, bounded)
        return replace(part, head=frozenset({head}), tail=frozenset({tail}))

    def _refuse_blurred(self, before: Iterable[_Open], after: Iterable[_Open], *, counted: bool) -> None:
        if any(one.blurs(other, counted=counted) for one in before for other in after):
            self._refuse(
                "a repetition follows another one of the same characters, so that a text can be split between them in "
                "many ways; put a fixed other character between them"
            )

    def _counted(self, inner: str, low: int, high: int | None) -> str:
        if max(low, high or 0) < _MANY:
            return f"({inner}){{{low},{'' if high is None else high}}}"
        return f"({self._rules.repeated(self._rules.add('atom', inner), low, high)})"


def _is_character(term: Term) -> bool:
    return term[0] == "set" and len(term[1]) == 1 and term[1][0][0] == term[1][0][1]
