"""Reads a grammar that a caller wrote, in the notation of llama.cpp (GBNF), which xgrammar and vLLM take too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

MAX_GRAMMAR_CHARACTERS = 32 * 1024
MAX_RULES = 500
_MAX_DEPTH = 50
_MAX_CODE = 0x10FFFF

_TOKEN = re.compile(
    r'(?:\s|\#[^\n]*)+|(?P<name>[A-Za-z_-][\w-]*)|(?P<is>::=)|"(?P<literal>(?:[^"\\\n]|\\.)*)"'
    r"|\[(?P<set>(?:[^\]\\\n]|\\.)*)\]|\{\s*(?P<least>\d{1,7})\s*(?P<comma>,?)\s*(?P<most>\d{0,7})\s*\}|(?P<sign>[()|*+?.])",
    re.ASCII,
)
_UNIT = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class GrammarRefused(ValueError):
    """The grammar is wrong, or uses what cannot be enforced."""


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Set:
    """One character out of ranges of code points, or, inverted, out of all others."""

    ranges: tuple[tuple[int, int], ...]
    inverted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """What another rule says."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class RuleRow:
    """One after the other."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RuleChoice:
    """One of these."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """The same `least` to `most` times (None: any number)."""

    node: Node
    least: int
    most: int | None


Node = Literal | Set | Name | RuleRow | RuleChoice | Times


class _Token(NamedTuple):
    kind: str
    text: str
    match: re.Match[str]


def read_grammar(text: str) -> dict[str, Node]:
    """The rules by name, in their order. Raises GrammarRefused."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(f"it has {len(text)} characters, the bound here is {MAX_GRAMMAR_CHARACTERS}")
    tokens = _tokens(text)
    reader = _Reader(tokens)
    rules: dict[str, Node] = {}
    while not reader.at_end:
        name, node = reader.rule()
        if name in rules:
            raise GrammarRefused(f"the rule {name[:100]!r} is defined twice")
        rules[name] = node
    if "root" not in rules:
        raise GrammarRefused('it has no rule root; write rules as in: root ::= "yes" | "no"')
    if len(rules) > MAX_RULES:
        raise GrammarRefused(f"it has {len(rules)} rules, the bound here is {MAX_RULES}")
    return rules


def _tokens(text: str) -> list[_Token]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            line = text.count("\n", 0, position) + 1
            raise GrammarRefused(
                f"line {line}: {text[position : position + 20]!r} cannot be read; rules are: name ::= …"
            )
        if match.lastgroup is not None:
            kind = "count" if match["least"] is not None else match.lastgroup
            tokens.append(_Token(kind, match[0], match))
        position = match.end()
    return tokens


class _Reader:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    @property
    def at_end(self) -> bool:
        return self._next >= len(self._tokens)

    def _shows(self, kind: str, text: str | None = None, *, ahead: int = 0) -> bool:
        if self._next + ahead >= len(self._tokens):
            return False
        token = self._tokens[self._next + ahead]
        return token.kind == kind and text in {None, token.text}

    def _take(self) -> _Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def rule(self) -> tuple[str, Node]:
        """The next rule."""
        if not (self._shows("name") and self._shows("is", ahead=1)):
            raise GrammarRefused(f'a rule is expected, as in root ::= "yes", where {self._take().text[:40]!r} stands')
        name = self._take().text
        self._take()
        return name, self._choice(name)

    def _choice(self, rule: str) -> Node:
        options = [self._row(rule)]
        while self._shows("sign", "|"):
            self._take()
            options.append(self._row(rule))
        return options[0] if len(options) == 1 else RuleChoice(tuple(options))

    def _row(self, rule: str) -> Node:
        nodes: list[Node] = []
        while not (self.at_end or self._shows("sign", "|") or self._shows("sign", ")") or self._shows("is", ahead=1)):
            nodes.append(self._counted(self._atom(rule), rule))
        return nodes[0] if len(nodes) == 1 else RuleRow(tuple(nodes))

    def _atom(self, rule: str) -> Node:
        token = self._take()
        match token.kind:
            case "name":
                return Name(token.text)
            case "literal":
                return Literal("".join(map(chr, _codes(token.match["literal"]))))
            case "set":
                return _set(token.match["set"], rule)
        if token.text == ".":
            return Set((), inverted=True)
        if token.text != "(":
            raise GrammarRefused(f"unexpected {token.text!r} in the rule {rule[:100]!r}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarRefused("groups are nested too deeply")
        inner = self._choice(rule)
        self._depth -= 1
        if not self._shows("sign", ")"):
            raise GrammarRefused(f"a group is not closed in the rule {rule[:100]!r}")
        self._take()
        return inner

    def _counted(self, node: Node, rule: str) -> Node:
        if self._shows("sign") and self._tokens[self._next].text in _SIGNS:
            least, most = _SIGNS[self._take().text]
            return self._once(Times(node, least, most), rule)
        if self._shows("count"):
            match = self._take().match
            least = int(match["least"])
            most = least if not match["comma"] else int(match["most"]) if match["most"] else None
            if most is not None and most < least:
                raise GrammarRefused(f"a count whose limits are the wrong way round in the rule {rule[:100]!r}")
            return self._once(Times(node, least, most), rule)
        return node

    def _once(self, node: Node, rule: str) -> Node:
        if self._shows("count") or (self._shows("sign") and self._tokens[self._next].text in _SIGNS):
            raise GrammarRefused(f"two counts in a row in the rule {rule[:100]!r}")
        return node


def _codes(text: str) -> list[int]:
    found = []
    for match in _UNIT.finditer(text):
        code = next((one for one in match.groups()[:3] if one is not None), None)
        if code is not None:
            found.append(int(code, 16))
        else:
            found.append(ord(_ESCAPES.get(match[4], match[4]) if match[4] is not None else match[5]))
        if found[-1] > _MAX_CODE or 0xD800 <= found[-1] <= 0xDFFF:
            raise GrammarRefused(f"{match[0]} is no character")
    return found


def _set(body: str, rule: str) -> Set:
    inverted = body.startswith("^")
    units = _UNIT.findall(body[inverted:])
    codes = _codes(body[inverted:])
    ranges = []
    index = 0
    while index < len(codes):
        low = high = codes[index]
        if units[index + 1 : index + 2] and units[index + 1][4] == "-" and index + 2 < len(codes):
            high = codes[index + 2]
            index += 2
        if high < low:
            raise GrammarRefused(f"a range that is none in the rule {rule[:100]!r}")
        ranges.append((low, high))
        index += 1
    if not ranges and not inverted:
        raise GrammarRefused(f"a class without characters in the rule {rule[:100]!r}")
    return Set(tuple(ranges), inverted)
