"""A grammar that a caller wrote, in the notation of llama.cpp (GBNF), which xgrammar and vLLM take too.

The runtime ends the process at a mistake in a grammar, and follows every way to read a text. So a grammar is checked
here, and rewritten as one regular expression: its rules may refer to each other, but not to themselves.
"""

from __future__ import annotations

import re
from itertools import zip_longest

MAX_GRAMMAR_CHARACTERS = 32 * 1024
# Of the expression, with each rule written out wherever it is referred to.
MAX_EXPRESSION_CHARACTERS = 64 * 1024
_MAX_CODE = 0x10FFFF

_TOKEN = re.compile(
    r'(?:\s|\#[^\n]*)+|(?P<name>[A-Za-z_-][\w-]*)|(?P<is>::=)|"(?P<literal>(?:[^"\\\n]|\\.)*)"'
    r"|\[(?P<set>(?:[^\]\\\n]|\\.)*)\]|(?P<count>\{\s*\d{1,7}\s*(?:,\s*\d{0,7}\s*)?\}|[*+?])|(?P<sign>[()|.])",
    re.ASCII,
)
_UNIT = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class GrammarRefused(ValueError):
    """The grammar is wrong, or uses what cannot be enforced."""


def grammar_expression(source: str) -> str:
    """The regular expression of the texts that the grammar's `root` admits. Raises GrammarRefused."""
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(f"it has {len(source)} characters, the bound here is {MAX_GRAMMAR_CHARACTERS}")
    rules = _rules(source)
    if "root" not in rules:
        raise GrammarRefused('it has no rule root; write rules as in: root ::= "yes" | "no"')
    return _Expansion(rules).of("root")


def _rules(source: str) -> dict[str, list[re.Match[str]]]:
    """The tokens of each rule's body, by name."""
    tokens = _tokens(source)
    rules: dict[str, list[re.Match[str]]] = {}
    body: list[re.Match[str]] = []
    for token, following in zip_longest(tokens, tokens[1:]):
        if token.lastgroup == "name" and following is not None and following.lastgroup == "is":
            if token[0] in rules:
                raise GrammarRefused(f"the rule {token[0][:100]!r} is defined twice")
            body = rules[token[0]] = []
        elif not rules or (token.lastgroup == "is" and body):
            raise GrammarRefused(f'a rule is expected, as in root ::= "yes", where {token[0][:40]!r} stands')
        elif token.lastgroup == "count" and following is not None and following.lastgroup == "count":
            raise GrammarRefused(f"two counts in a row: {token[0]}{following[0]}")
        elif token.lastgroup != "is":
            body.append(token)
    return rules


def _tokens(source: str) -> list[re.Match[str]]:
    tokens = []
    position = 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            line = source.count("\n", 0, position) + 1
            raise GrammarRefused(
                f"line {line}: {source[position : position + 20]!r} cannot be read; rules are: name ::= …"
            )
        if match.lastgroup is not None:
            tokens.append(match)
        position = match.end()
    return tokens


class _Expansion:
    """Writes out the rules that a rule refers to."""

    def __init__(self, rules: dict[str, list[re.Match[str]]]) -> None:
        self._rules = rules
        self._open: list[str] = []
        self._length = 0

    def of(self, name: str) -> str:
        """The whole expression of a rule."""
        if name not in self._rules:
            raise GrammarRefused(f"there is no rule {name[:100]!r}")
        if name in self._open:
            raise GrammarRefused(
                f"the rule {name[:100]!r} refers to itself; write a repetition with * or + instead, and nested forms "
                "as a JSON schema"
            )
        self._open.append(name)
        parts = [self._written(token) for token in self._rules[name]]
        self._open.pop()
        return f"(?:{''.join(parts)})"

    def _written(self, token: re.Match[str]) -> str:
        match token.lastgroup:
            case "name":
                written = self.of(token[0])
            case "literal":
                written = f"(?:{''.join(map(_escaped, _UNIT.findall(token['literal'])))})"
            case "set":
                inverted = token["set"].startswith("^")
                units = _UNIT.findall(token["set"][inverted:])
                members = (
                    unit if unit == "-" and 0 < place < len(units) - 1 else _escaped(unit)
                    for place, unit in enumerate(units)
                )
                written = f"[{'^' * inverted}{''.join(members)}]"
            case _:
                written = {"(": "(?:", ".": r"[\s\S]"}.get(token[0], re.sub(r"\s", "", token[0]))
        self._length += len(written) if token.lastgroup != "name" else 4
        if self._length > MAX_EXPRESSION_CHARACTERS:
            raise GrammarRefused(
                f"with its rules written out it has more than {MAX_EXPRESSION_CHARACTERS} characters, the bound here"
            )
        return written


def _escaped(unit: str) -> str:
    """A character, or an escape for one, as expressions write it."""
    if len(unit) > 2:
        code = int(unit[2:], 16)  # noqa: FURB166  # no prefix but an escape
        if code > _MAX_CODE or 0xD800 <= code <= 0xDFFF:
            raise GrammarRefused(f"{unit} is no character")
        unit = chr(code)
    elif len(unit) == 2:
        unit = _ESCAPES.get(unit[1], unit[1])
    return unit if unit.isalnum() else f"\\{unit}"
