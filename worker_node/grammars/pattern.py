"""A regular expression to EBNF, for the inside of a JSON string or for a text of its own.

The subset that means the same in every dialect of regular expressions: literals, `.`, classes, groups, alternation,
counts, and conditions on what follows. The whole text has to match: what is so admitted also matches where JSON Schema
only searches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from worker_node.grammars.character_sets import DOT, NAMED, CharacterSet, one, united
from worker_node.grammars.ebnf import Rules
from worker_node.grammars.pattern_joiner import PatternJoiner
from worker_node.grammars.pattern_parts import Part, closing, part_of
from worker_node.grammars.regular import (
    EMPTY,
    EVERYTHING,
    Term,
    TooManyStates,
    both,
    one_of,
    regular_to_ebnf,
    then,
    without,
)
from worker_node.grammars.regular import either as any_of
from worker_node.grammars.regular import text as text_of
from worker_node.grammars.writing import JSON_STRING, Writing

MAX_PATTERN_CHARACTERS = 1000
_MAX_DEPTH = 50
# In some dialects `$` is also before a last end of line.
_END = any_of([EMPTY, text_of("\n")])
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}


class PatternRefused(ValueError):
    """The expression is wrong, or uses what cannot be turned into a grammar."""


def pattern_to_ebnf(
    pattern: str, rules: Rules, spend: Callable[[], None] = lambda: None, writing: Writing = JSON_STRING
) -> str | None:
    """Return the EBNF of the texts that match as a whole, None if there are none; rules are added to `rules`.

    Where the runtime could not follow the expression as it is written, its automaton is used. Raises PatternRefused.
    """
    parser = _Parser(pattern, rules, _Context(writing))
    whole = parser.whole()
    if parser.refusal is None:
        return whole.text
    try:
        return regular_to_ebnf(whole.term, rules, spend, writing)
    except TooManyStates as error:
        raise PatternRefused(f"{parser.refusal}; as an automaton {error}") from None


def pattern_to_terms(pattern: str) -> tuple[Term, Term]:
    """The strings in which the expression is found: in every dialect, and in any. Raises PatternRefused."""
    whole = _Parser(pattern, Rules(), _Context(JSON_STRING, before=EVERYTHING, after=EVERYTHING)).whole()
    return whole.term, whole.wide


@dataclass(frozen=True, slots=True)
class _Context:
    """How characters are written, and what may stand around the expression where it does not say `^` and `$`."""

    writing: Writing
    before: Term = EMPTY
    after: Term = EMPTY
    # Whether `^` can hold: not in a condition in the middle.
    may_begin: bool = True


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A condition on all that follows: the texts that meet it in every dialect, and in any."""

    term: Term
    wide: Term


class _Parser:
    def __init__(self, text: str, rules: Rules, context: _Context) -> None:
        self.text = text
        self.position = 0
        self._depth = 0
        self._context = context
        self._sequences = PatternJoiner(rules)

    @property
    def refusal(self) -> str | None:
        """Why the runtime could not follow the expression as it is written."""
        return self._sequences.refusal

    def whole(self) -> Part:
        """All of the expression."""
        if len(self.text) > MAX_PATTERN_CHARACTERS:
            raise PatternRefused(f"it has {len(self.text)} characters, the bound here is {MAX_PATTERN_CHARACTERS}")
        part = self._alternatives(top=True)
        if self.position < len(self.text):
            raise PatternRefused(f"unexpected {self._peek()!r} at {self._place}")
        return part

    @property
    def _place(self) -> str:
        return f"position {self.position}"

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise PatternRefused("the expression ends too early")
        self.position += 1
        return character

    def _accept(self, text: str) -> bool:
        found = self.text.startswith(text, self.position)
        self.position += len(text) * found
        return found

    def _alternatives(self, *, top: bool = False) -> Part:
        sequence = self._top_sequence if top else self._sequence
        options = [sequence()]
        while self._accept("|"):
            options.append(sequence())
        return self._sequences.either(options, self._place)

    def _sequence(self) -> Part:
        parts = []
        while self._peek() not in {"", "|", ")"}:
            parts.append(self._repeated(self._atom()))
        return self._sequences.joined(parts, self._place)

    def _top_sequence(self) -> Part:
        begun = self._context.may_begin and self._accept("^")
        items: list[Part | _Ahead] = []
        after = widest = self._context.after
        while self._peek() not in {"", "|", ")"}:
            if self._peek() == "$" and self.text[self.position + 1 : self.position + 2] in {"", "|"}:
                self._take()
                after, widest = EMPTY, _END
                break
            if self.text.startswith(("(?=", "(?!"), self.position):
                items.append(self._ahead(at_start=not items and (begun or self._context.before == EMPTY)))
            else:
                items.append(self._repeated(self._atom()))
        joined = self._sequences.joined([item for item in items if isinstance(item, Part)], self._place)
        term, wide = after, widest
        for item in reversed(items):
            if isinstance(item, Part):
                term, wide = then(item.term, term), then(item.wide, wide)
            else:
                term, wide = both([term, item.term]), both([wide, item.wide])
        # What is searched for may have anything before it.
        before = EMPTY if begun else self._context.before
        return replace(joined, term=then(before, term), wide=then(before, wide))

    def _ahead(self, *, at_start: bool) -> _Ahead:
        self._sequences.refuse("a condition on what follows can be enforced by an automaton only")
        self.position += 2
        inverted = self._take() == "!"
        end = closing(self.text, self.position)
        if end is None:
            raise PatternRefused("a group is not closed")
        inner, self.position = self.text[self.position : end], end + 1
        context = _Context(self._context.writing, after=EVERYTHING, may_begin=at_start)
        part = _Parser(inner, Rules(), context).whole()
        if inverted:
            return _Ahead(without(part.wide), without(part.term))
        return _Ahead(part.term, part.wide)

    def _atom(self) -> Part:
        character = self._take()
        match character:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return self._one_of(DOT)
            case "\\":
                return self._escape()
            case "^" | "$":
                raise PatternRefused(f"{character} in the middle, at position {self.position - 1}")
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise PatternRefused(f"unexpected {character!r} at position {self.position - 1}")
        return self._single(character)

    def _group(self) -> Part:
        if self._accept("?") and not self._accept(":"):
            raise PatternRefused(f"a group with (?{self._peek()} at {self._place}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternRefused("groups are nested too deeply")
        inner = self._alternatives()
        self._depth -= 1
        if not self._accept(")"):
            raise PatternRefused("a group is not closed")
        return inner

    def _escape(self) -> Part:
        character = self._take()
        if character in NAMED:
            return self._one_of(NAMED[character])
        if character in _CONTROL:
            return self._single(_CONTROL[character])
        if character.isalnum():
            raise PatternRefused(f"\\{character}")
        return self._single(character)

    def _single(self, character: str) -> Part:
        written = self._context.writing.written(character)
        if written is None:
            raise PatternRefused("a control character")
        return part_of(written, ((ord(character), ord(character)),))

    def _one_of(self, wanted: CharacterSet) -> Part:
        """A character of a set: written are those that are in it in every dialect."""
        plain = [part for low, high in wanted.sure for part in self._context.writing.plain(low, high)]
        if not plain:
            raise PatternRefused("a class without a character that can stand in the text as it is")
        return part_of(one_of(plain), tuple(plain), wanted.sure, tuple(wanted.widest))

    def _class(self) -> Part:
        inverted = self._accept("^")
        members = []
        while not self._accept("]"):
            members.append(self._class_member())
        found = united(members)
        return self._one_of(found.inverted() if inverted else found)

    def _class_member(self) -> CharacterSet:
        low = self._class_character()
        if isinstance(low, CharacterSet):
            return low
        if self._peek() == "-" and self.text[self.position + 1 : self.position + 2] not in {"]", ""}:
            self._take()
            high = self._class_character()
            if isinstance(high, CharacterSet) or high < low:
                raise PatternRefused(f"a range that is none, at {self._place}")
            return CharacterSet([(low, high)], [(low, high)])
        return one(low)

    def _class_character(self) -> int | CharacterSet:
        character = self._take()
        if character == "[":
            raise PatternRefused("a [ inside a class; write \\[")
        if character != "\\":
            return ord(character)
        escaped = self._take()
        if escaped in NAMED:
            return NAMED[escaped]
        if escaped in _CONTROL:
            return ord(_CONTROL[escaped])
        if escaped.isalnum():
            raise PatternRefused(f"\\{escaped} in a class")
        return ord(escaped)

    def _repeated(self, atom: Part) -> Part:
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
            raise PatternRefused(f"two counts in a row at {self._place}")
        self._accept("?")  # lazy or not, the same texts match
        return self._sequences.repeated(atom, low, high, self._place)

    def _counts(self) -> tuple[int, int | None]:
        body, closed, _ = self.text[self.position :].partition("}")
        low, comma, high = body.partition(",")
        if not closed or not low.isdecimal() or not (high == "" or high.isdecimal()) or len(body) > 12:
            raise PatternRefused(f"a count that is none, at {self._place}")
        self.position += len(body) + 1
        least = int(low)
        most = least if not comma else (int(high) if high else None)
        if most is not None and most < least:
            raise PatternRefused("a count whose limits are the wrong way round")
        return least, most
