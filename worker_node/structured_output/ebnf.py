"""The pieces of an EBNF text: literals, classes, counted repetition, named rules, and the rules of JSON itself."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from os.path import commonprefix
from typing import Any

Ranges = Iterable[tuple[int, int]]

MAX_CODE = 0x10FFFF
# White space is at most one line break and an indentation: a weak model may otherwise write blanks, or blank lines,
# until its tokens are spent.
JSON_RULES = {
    "ws": r'"\n"? [ \t]{0,16}',
    "char": r'[^"\\\x00-\x1f] | "\\" ["\\/bfnrt] | "\\u" [0-9A-CEFa-cef] [0-9A-Fa-f]{3}',
    "string": r'"\"" char* "\""',
    "integer": r'"-"? ("0" | [1-9] [0-9]{0,14})',
    "number": r'integer ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,2})?',
    "member": r'string ws ":" ws value',
    "object": r'"{" ws (member (ws "," ws member)*)? ws "}"',
    "array": r'"[" ws (value (ws "," ws value)*)? ws "]"',
    "end": '""',
    "value": r'object | array | string | number | "true" | "false" | "null"',
}

# Names of rules; literals and classes are skipped.
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|([A-Za-z]\w*)')
_LAST_ASCII = 0x7F
# Where UTF-8 takes another form; what begins at 0xD800 are surrogates, which are no characters.
_EDGES = (0, 0x80, 0x800, 0x1000, 0xD000, 0xD800, 0xE000, 0x1_0000, 0x4_0000, 0x10_0000, MAX_CODE + 1)
_UTF_8 = [(low, end - 1) for low, end in pairwise(_EDGES) if low != 0xD800]
# The runtime tests each state of a count against the whole vocabulary: 11 s for 2,000 characters in one count. Counts
# are made of blocks, which all counts of the same item share.
_BLOCK = 16
# Each way to end a count is compiled by itself. From here on there are four of them: a little less is admitted.
_ROUNDED_FROM = 64
_ROUND = 4


def literal(text: str) -> str:
    written = []
    after_code = False
    for character in text:
        # The runtime writes what is not ASCII as a code, and reads as many hex digits after a code as there are: a new
        # string ends it.
        if after_code and character in string.hexdigits:
            written.append('" "')
        if character in '"\\':
            written.append("\\")
        written.append(character if character.isprintable() else _code(ord(character)))
        after_code = not (character.isascii() and character.isprintable())
    return '"' + "".join(written) + '"'


def json_literal(value: Any) -> str:
    return literal(compact_json(value))


def compact_json(value: Any) -> str:
    """Raises ValueError for a number that JSON cannot hold."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def one_text(texts: Iterable[str]) -> str:
    return branches(dict.fromkeys(texts, ""))


def branches(ways: Mapping[str, str]) -> str:
    """The EBNF of one of the texts and what follows it; common beginnings of texts are written once.

    Side by side the runtime mixes them up: `"1.5" | "2.0" | "2.5"` let `1.0` pass (openvino-genai 2026.4).
    """
    parts = []
    for _, group in groupby(sorted(ways), key=lambda text: text[:1]):
        same = list(group)
        prefix = commonprefix(same)  # noqa: RUF071  (of texts, not of paths)
        rest = ways[prefix] if len(same) == 1 else f"({branches({text[len(prefix) :]: ways[text] for text in same})})"
        parts.append(f"{literal(prefix)} {rest}".rstrip())
    return " | ".join(parts)


def _code(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def merged_ranges(ranges: Ranges) -> tuple[tuple[int, int], ...]:
    """The same code points in ranges that are in order and apart."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> list[tuple[int, int]]:
    """The code points that are in none of the ranges."""
    edges = [-1, *(edge for low, high in merged_ranges(ranges) for edge in (low, high)), MAX_CODE + 1]
    return [(end + 1, low - 1) for end, low in zip(edges[::2], edges[1::2], strict=True) if end + 1 < low]


def one_of(ranges: Ranges) -> str:
    """The EBNF of one character out of at least one range of code points."""
    joined = merged_ranges(ranges)
    if len(joined) == 1 and joined[0][0] == joined[0][1]:
        return literal(chr(joined[0][0]))
    if joined[-1][1] == MAX_CODE and joined[-1][0] <= _LAST_ASCII + 1:
        # The runtime reads a negated class right only if what it names is ASCII.
        opening, parts = "[^", complement(joined)
    else:
        opening, parts = "[", [part for low, high in joined for part in _encoded(low, high)]
    # All as codes: a plain hex digit would be read as part of the code before it.
    body = "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in parts)
    return f"{opening}{body}]"


def _encoded(low: int, high: int) -> list[tuple[int, int]]:
    """A range, cut where UTF-8 takes another form: else the runtime writes bytes that no character begins with."""
    parts = [(max(low, start), min(high, end)) for start, end in _UTF_8]
    return [(start, end) for start, end in parts if start <= end] or [(low, high)]


@dataclass(frozen=True, slots=True)
class Writing:
    """How the characters of a text stand in an answer: inside a JSON string, or as they are.

    `escapes` are characters that are written as several; those in `left_out` are never written otherwise.
    """

    left_out: tuple[tuple[int, int], ...]
    escapes: Mapping[str, str]

    @property
    def not_plain(self) -> list[tuple[int, int]]:
        return [*self.left_out, *((ord(one), ord(one)) for one in self.escapes)]

    def plain(self, ranges: Ranges) -> list[tuple[int, int]]:
        """The characters of the ranges that can stand as they are."""
        return complement([*complement(ranges), *self.not_plain])


JSON_STRING = Writing(((0x00, 0x1F),), {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\f": "\\f", '"': '\\"', "\\": "\\\\"})
# The runtime's grammars hold no control characters but those of white space.
AS_IT_IS = Writing(((0x00, 0x08), (0x0B, 0x0C), (0x0E, 0x1F), (0x7F, 0x7F)), {})


class Rules:
    """Named rules of one grammar; a rule's name can be had before its body."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = dict(JSON_RULES)
        self._by_body: dict[str, str] = {}
        # Names of automata, by what they were made from.
        self.automata: dict[Any, str | None] = {}
        self.size = 0

    def reserve(self, hint: str) -> str:
        name = f"{hint}{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> str:
        self.size += len(body)
        self._bodies[name] = body
        return name

    def add(self, hint: str, body: str) -> str:
        """The name of a rule with this body: equal parts of a schema share one, and are compiled once."""
        name = self._by_body.get(body)
        if name is None:
            name = self._by_body[body] = self.define(self.reserve(hint), body)
        return name

    def apart(self, part: str) -> str:
        """A rule for a part of a choice that the runtime does not merge with the other parts.

        It copies rules that refer to no others into the choice, and then mixes up what begins alike.
        """
        names = [name for name in _NAME.findall(self._bodies.get(part, part)) if name]
        return part if names else self.add("part", f"{part} end")

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

    def repeated(self, item: str, least: int, most: int | None) -> str:
        """`least` to `most` items (None: any number) of a rule. A range above 64 ends up to three items early."""
        parts = self._exactly(item, least)
        if most is None:
            parts.append(f"{item}*")
        elif most > least:
            span = most - least
            parts.append(self._up_to(item, span if span < _ROUNDED_FROM else (span + 1) // _ROUND * _ROUND - 1))
        return " ".join(parts) or '""'

    def _exactly(self, item: str, count: int) -> list[str]:
        parts = []
        for size in (_BLOCK * _BLOCK, _BLOCK, 1):
            if blocks := count // size:
                # A rule of its own, so that it is shared.
                exact = f"{self._block(item, size)}{{{blocks}}}"
                parts.append(exact if size > 1 else self.add("exactly", exact))
            count %= size
        return parts

    def _up_to(self, item: str, most: int) -> str:
        if most < _BLOCK:
            return self.add("upto", f"{item}{{0,{most}}}")
        size = _BLOCK if most < _BLOCK * _BLOCK else _BLOCK * _BLOCK
        block, full, rest = self._block(item, size), most // size, most % size
        whole = f"{block}{{0,{full - 1}}} {self._up_to(item, size - 1)}"
        last = f"{block}{{{full}}} {self._up_to(item, rest)}" if rest else f"{block}{{{full}}}"
        return self.add("upto", f"{whole} | {last}")

    def _block(self, item: str, size: int) -> str:
        return item if size == 1 else self.add("block", f"{self._block(item, size // _BLOCK)}{{{_BLOCK}}}")
