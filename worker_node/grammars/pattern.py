"""A regular expression to EBNF, for the inside of a JSON string.

The subset that means the same in every dialect of regular expressions: literals, `.`, classes, groups, alternation and
counts. The whole string has to match: what is so admitted also matches where JSON Schema only searches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from worker_node.grammars.ebnf import Rules, character_class, literal
from worker_node.grammars.json_characters import UNWRITABLE, Ranges, without_unwritable
from worker_node.grammars.pattern_parts import Characters, Open, Part, complement, either, part_of, repeated_term, size
from worker_node.grammars.regular import EMPTY, EVERYTHING, Term, then
from worker_node.grammars.repetition import repeated

MAX_PATTERN_CHARACTERS = 1000
MAX_REPEAT = 1000
MAX_NESTED_REPEAT = 20
# From here on a count is made of blocks.
_MANY = 8
_FEW = 16

_DIGIT = [(0x30, 0x39)]
_WORD = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": [(0x20, 0x20)]}
# What some dialects count among the digits, letters or blanks.
_FUZZY = [(0x09, 0x0D), (0x80, 0x10FFFF)]
_ANY: Characters = ((0, 0x10FFFF),)
# A dot leaves out these, or some of them.
_ENDS_OF_LINES = [(0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029)]
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_JSON_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\f": "\\f", '"': '\\"', "\\": "\\\\"}


class PatternRefused(ValueError):
    """The expression is wrong, or uses what cannot be turned into a grammar."""


def pattern_to_ebnf(pattern: str, rules: Rules) -> str:
    """Return the EBNF of the strings that match, without the quotes; counts are added to `rules`.

    Raises PatternRefused.
    """
    return _Parser(pattern, rules).whole().text


def pattern_to_terms(pattern: str) -> tuple[Term, Term]:
    """The strings in which the expression is found: in every dialect, and in any. Raises PatternRefused."""
    whole = _Parser(pattern, Rules()).whole()
    return whole.term, whole.wide


class _Parser:
    def __init__(self, text: str, rules: Rules) -> None:
        self.text = text
        self.rules = rules
        self.position = 0
        self.depth = 0

    def whole(self) -> Part:
        """All of the expression."""
        if len(self.text) > MAX_PATTERN_CHARACTERS:
            raise PatternRefused(f"it has {len(self.text)} characters, the bound here is {MAX_PATTERN_CHARACTERS}")
        part = self.alternatives(top=True)
        if not self.at_end:
            raise PatternRefused(f"unexpected {self.peek()!r} at position {self.position}")
        return part

    @property
    def at_end(self) -> bool:
        return self.position >= len(self.text)

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def take(self) -> str:
        character = self.peek()
        if not character:
            raise PatternRefused("the expression ends too early")
        self.position += 1
        return character

    def accept(self, text: str) -> bool:
        found = self.text.startswith(text, self.position)
        self.position += len(text) * found
        return found

    def alternatives(self, *, top: bool = False) -> Part:
        options = [self._sequence(top=top)]
        while self.accept("|"):
            options.append(self._sequence(top=top))
        return either(options)

    def _sequence(self, *, top: bool) -> Part:
        parts: list[Part] = []
        begun = self.accept("^") if top else True
        ended = not top
        while not self.at_end and self.peek() not in "|)":
            if top and self.peek() == "$" and self.text[self.position + 1 : self.position + 2] in {"", "|"}:
                self.take()
                ended = True
                break
            parts.append(self._repeated(self._atom()))
        joined = self._joined(parts)
        # What is searched for may have anything before and after it.
        before, after = EMPTY if begun else EVERYTHING, EMPTY if ended else EVERYTHING
        return replace(joined, term=then(before, then(joined.term, after)), wide=then(before, then(joined.wide, after)))

    def _joined(self, parts: list[Part]) -> Part:
        first: Characters = ()
        head: tuple[Open, ...] = ()
        tail: tuple[Open, ...] = ()
        empty = True
        for part in parts:
            self._refuse_blurred(tail, part.head, counted=False)
            first += part.first if empty else ()
            head += part.head if empty else ()
            tail = part.tail + (tail if part.empty else ())
            empty = empty and part.empty
        return Part(
            " ".join(part.text for part in parts) or '""',
            empty,
            any(part.counted for part in parts),
            tuple(dict.fromkeys(one for part in parts for one in part.characters)),
            first,
            head,
            tail,
            reduce(lambda after, part: then(part.term, after), reversed(parts), EMPTY),
            reduce(lambda after, part: then(part.wide, after), reversed(parts), EMPTY),
        )

    def _refuse_blurred(self, before: tuple[Open, ...], after: tuple[Open, ...], *, counted: bool) -> None:
        # The runtime follows every way to split a text: 10 characters of `(.{1,20}){2}` keep it busy for minutes.
        if any(one.blurs(other, counted=counted) for one in before for other in after):
            raise PatternRefused(
                "a count follows another repetition of the same characters, so that a text can be split between them "
                f"in many ways, before position {self.position}; put a fixed other character between them"
            )

    def _atom(self) -> Part:
        character = self.take()
        match character:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return part_of(character_class(UNWRITABLE, negated=True), _ANY, complement(_ENDS_OF_LINES), _ANY)
            case "\\":
                return self._escape()
            case "^" | "$":
                raise PatternRefused(f"{character} in the middle, at position {self.position - 1}")
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise PatternRefused(f"unexpected {character!r} at position {self.position - 1}")
        return _single(character)

    def _group(self) -> Part:
        if self.accept("?") and not self.accept(":"):
            raise PatternRefused(f"a group with (?{self.peek()} at position {self.position}")
        self.depth += 1
        if self.depth > 50:
            raise PatternRefused("groups are nested too deeply")
        inner = self.alternatives()
        self.depth -= 1
        if not self.accept(")"):
            raise PatternRefused("a group is not closed")
        return inner

    def _escape(self) -> Part:
        character = self.take()
        if character in _CLASSES:
            ranges = _CLASSES[character]
            return part_of(character_class(ranges), tuple(ranges), wide=(*ranges, *_FUZZY))
        if character in _CONTROL:
            return _single(_CONTROL[character])
        if character.isalnum():
            raise PatternRefused(f"\\{character}")
        return _single(character)

    def _class(self) -> Part:
        negated = self.accept("^")
        ranges: Ranges = []
        fuzzy: Ranges = []
        while not self.accept("]"):
            fuzzy += _FUZZY if self.text[self.position : self.position + 2] in {"\\d", "\\w", "\\s"} else []
            ranges += self._class_member()
        if negated:
            wide = complement(ranges)
            written = character_class([*UNWRITABLE, *ranges], negated=True)
            return part_of(written, tuple(wide), complement([*ranges, *fuzzy]), tuple(wide))
        writable = [part for low, high in ranges for part in without_unwritable(low, high)]
        if not writable:
            raise PatternRefused("a class without a character that can stand in a JSON string as it is")
        return part_of(character_class(writable), tuple(writable), ranges, (*ranges, *fuzzy))

    def _class_member(self) -> Ranges:
        low = self._class_character()
        if isinstance(low, list):
            return low
        if self.peek() == "-" and self.text[self.position + 1 : self.position + 2] not in {"]", ""}:
            self.take()
            high = self._class_character()
            if isinstance(high, list) or high < low:
                raise PatternRefused(f"a range that is none, at position {self.position}")
            return [(low, high)]
        return [(low, low)]

    def _class_character(self) -> int | Ranges:
        character = self.take()
        if character == "[":
            raise PatternRefused("a [ inside a class; write \\[")
        if character != "\\":
            return ord(character)
        escaped = self.take()
        if escaped in _CLASSES:
            return _CLASSES[escaped]
        if escaped in _CONTROL:
            return ord(_CONTROL[escaped])
        if escaped.isalnum():
            raise PatternRefused(f"\\{escaped} in a class")
        return ord(escaped)

    def _repeated(self, atom: Part) -> Part:
        if self.accept("{"):
            low, high = self._counts()
        elif self.accept("*"):
            low, high = 0, None
        elif self.accept("+"):
            low, high = 1, None
        elif self.accept("?"):
            low, high = 0, 1
        else:
            return atom
        if self.peek() in {"*", "+", "{"}:
            raise PatternRefused(f"two counts in a row at position {self.position}")
        self.accept("?")  # lazy or not, the same strings match
        most = max(low, high or 0)
        # A count of a count multiplies: the grammar would grow beyond what can be compiled in time.
        if most > (MAX_NESTED_REPEAT if atom.counted else MAX_REPEAT):
            raise PatternRefused(
                f"a count above {MAX_REPEAT}, or above {MAX_NESTED_REPEAT} of something that is counted itself"
            )
        # The runtime follows every way to split a text among such repetitions: a few dozen keep it busy for minutes.
        if atom.empty and (most > 1 or (high is None and atom.counted)):
            raise PatternRefused(f"a count of something that may be empty, before position {self.position}")
        text = self._counted(atom.text, low, high)
        empty = low == 0 or atom.empty
        term, wide = repeated_term(atom, low, high)
        more = replace(atom, text=text, empty=empty, counted=most > 1 or atom.counted, term=term, wide=wide)
        if high == 1:
            # A few letters or more that may be left out, several times in a row, can be split as counts can.
            left_out = (Open(atom.first, bounded=True),) if not low and size(atom.first) > _FEW else ()
            return replace(more, head=(*left_out, *atom.head), tail=(*left_out, *atom.tail))
        self._refuse_blurred(atom.tail, atom.head, counted=True)
        if low == high or atom.head or atom.tail:
            return more  # what is open inside is kept apart from itself, so by a character between
        bounded = high is not None
        return replace(more, head=(Open(atom.first, bounded),), tail=(Open(atom.characters, bounded),))

    def _counted(self, atom: str, low: int, high: int | None) -> str:
        if max(low, high or 0) < _MANY:
            return f"({atom}){{{low},{'' if high is None else high}}}"
        return f"({repeated(self.rules, self.rules.add('atom', atom), low, high)})"

    def _counts(self) -> tuple[int, int | None]:
        body, closed, _ = self.text[self.position :].partition("}")
        low, comma, high = body.partition(",")
        if not closed or not low.isdecimal() or not (high == "" or high.isdecimal()) or len(body) > 12:
            raise PatternRefused(f"a count that is none, at position {self.position}")
        self.position += len(body) + 1
        least = int(low)
        most = least if not comma else (int(high) if high else None)
        if most is not None and most < least:
            raise PatternRefused("a count whose limits are the wrong way round")
        return least, most


def _single(character: str) -> Part:
    return part_of(_character(character), ((ord(character), ord(character)),))


def _character(character: str) -> str:
    if character < " " and character not in _JSON_ESCAPES:
        raise PatternRefused("a control character")
    return literal(_JSON_ESCAPES.get(character, character))
