"""The pieces of an EBNF text: literals, rules, and the rules of JSON itself."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from typing import Any

# Bounded, because a weak model may otherwise write blanks until its tokens are spent.
JSON_RULES = {
    "ws": r"[ \n\t]{0,16}",
    "char": r'[^"\\\x00-\x1f] | "\\" ["\\/bfnrt] | "\\u" [0-9A-CEFa-cef] [0-9A-Fa-f]{3}',
    "string": r'"\"" char* "\""',
    "integer": r'"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": r'integer ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,2})?',
    "member": r'string ws ":" ws value',
    "object": r'"{" ws (member (ws "," ws member)*)? ws "}"',
    "array": r'"[" ws (value (ws "," ws value)*)? ws "]"',
    "value": r'object | array | string | number | "true" | "false" | "null"',
}

# Names of rules; literals and classes are skipped.
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|([A-Za-z]\w*)')


def literal(text: str) -> str:
    """The EBNF of exactly this text."""
    written = []
    after_code = False
    for character in text:
        # The runtime writes what is not ASCII as a code, and reads as many hex digits after a code as there are: a new
        # string ends it.
        if after_code and character in string.hexdigits:
            written.append('" "')
        written.append(_escaped(character))
        after_code = not (character.isascii() and character.isprintable())
    return '"' + "".join(written) + '"'


def json_literal(value: Any) -> str:
    """The EBNF of a value as compact JSON. Raises ValueError for a number that JSON cannot hold."""
    return literal(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def character_class(ranges: list[tuple[int, int]], *, negated: bool = False) -> str:
    """The EBNF of one character out of (or, negated, not in) ranges of code points, both ends included."""
    # All as codes: a plain hex digit would be read as part of the code before it.
    body = "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)
    return f"[{'^' if negated else ''}{body}]"


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else _code(ord(character))


def _code(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Rules:
    """Named rules of one grammar; a rule's name can be had before its body."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = dict(JSON_RULES)
        self._by_body: dict[str, str] = {}
        self.size = 0

    def reserve(self, hint: str) -> str:
        """A fresh name."""
        name = f"{hint}{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> str:
        """Give a name its body; returns the name."""
        self.size += len(body)
        self._bodies[name] = body
        return name

    def include(self, rules: Mapping[str, str]) -> None:
        """Add rules of fixed names, once."""
        self._bodies |= rules

    def add(self, hint: str, body: str) -> str:
        """The name of a rule with this body: equal parts of a schema share one, and are compiled once."""
        name = self._by_body.get(body)
        if name is None:
            name = self._by_body[body] = self.define(self.reserve(hint), body)
        return name

    def text(self, root: str) -> str:
        """The whole grammar: the rules of JSON, and those that the root needs."""
        needed = set(JSON_RULES)
        waiting = [root]
        while waiting:
            for name in _NAME.findall(waiting.pop()):
                if name and name not in needed:
                    needed.add(name)
                    waiting.append(self._bodies[name])
        bodies = (f"{name} ::= {body}" for name, body in self._bodies.items() if name in needed)
        return "\n".join([f"root ::= {root}", *bodies]) + "\n"
