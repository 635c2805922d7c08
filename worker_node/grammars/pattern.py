"""A regular expression to EBNF, for the inside of a JSON string.

The subset that means the same in every dialect of regular expressions: literals, `.`, classes, groups, alternation and
counts. The whole string has to match: what is so admitted also matches where JSON Schema only searches.
"""

from __future__ import annotations

from worker_node.grammars.ebnf import character_class, literal

MAX_REPEAT = 1000

_DIGIT = [(0x30, 0x39)]
_WORD = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": [(0x20, 0x20)]}
# What cannot stand in a JSON string as it is: a class or dot does not produce it.
_UNWRITABLE = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_JSON_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\f": "\\f", '"': '\\"', "\\": "\\\\"}

Ranges = list[tuple[int, int]]


class PatternRefused(ValueError):
    """The expression is wrong, or uses what cannot be turned into a grammar."""


def pattern_to_ebnf(pattern: str) -> str:
    """Return the EBNF of the strings that match, without the quotes. Raises PatternRefused."""
    parser = _Parser(pattern)
    ebnf = parser.alternatives(top=True)
    if not parser.at_end:
        raise PatternRefused(f"unexpected {parser.peek()!r} at position {parser.position}")
    return ebnf


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

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

    def alternatives(self, *, top: bool = False) -> str:
        options = [self._sequence(top=top)]
        while self.accept("|"):
            options.append(self._sequence(top=top))
        return "(" + " | ".join(options) + ")"

    def _sequence(self, *, top: bool) -> str:
        parts: list[str] = []
        if top:
            self.accept("^")
        while not self.at_end and self.peek() not in "|)":
            if top and self.peek() == "$" and self.text[self.position + 1 : self.position + 2] in {"", "|"}:
                self.take()
                break
            parts.append(self._repeated(self._atom()))
        return " ".join(parts) or '""'

    def _atom(self) -> str:
        character = self.take()
        match character:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return character_class(_UNWRITABLE, negated=True)
            case "\\":
                return self._escape()
            case "^" | "$":
                raise PatternRefused(f"{character} in the middle, at position {self.position - 1}")
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise PatternRefused(f"unexpected {character!r} at position {self.position - 1}")
        return _character(character)

    def _group(self) -> str:
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

    def _escape(self) -> str:
        character = self.take()
        if character in _CLASSES:
            return character_class(_CLASSES[character])
        if character in _CONTROL:
            return _character(_CONTROL[character])
        if character.isalnum():
            raise PatternRefused(f"\\{character}")
        return _character(character)

    def _class(self) -> str:
        negated = self.accept("^")
        ranges: Ranges = []
        while not self.accept("]"):
            ranges += self._class_member()
        if negated:
            return character_class([*_UNWRITABLE, *ranges], negated=True)
        writable = [part for low, high in ranges for part in _without_unwritable(low, high)]
        if not writable:
            raise PatternRefused("a class without a character that can stand in a JSON string as it is")
        return character_class(writable)

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

    def _repeated(self, atom: str) -> str:
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
        # A count of a count multiplies: the grammar would grow beyond what can be compiled in time.
        if max(low, high or 0) > (MAX_REPEAT if "{" not in atom else 20):
            raise PatternRefused(f"a count above {MAX_REPEAT}, or above 20 of something that is counted itself")
        return f"({atom}){{{low},{'' if high is None else high}}}"

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


def _character(character: str) -> str:
    if character < " " and character not in _JSON_ESCAPES:
        raise PatternRefused("a control character")
    return literal(_JSON_ESCAPES.get(character, character))


def _without_unwritable(low: int, high: int) -> Ranges:
    parts: Ranges = []
    for start, end in _UNWRITABLE:
        if low < start:
            parts.append((low, min(high, start - 1)))
        low = max(low, end + 1)
        if low > high:
            return parts
    return [*parts, (low, high)]
