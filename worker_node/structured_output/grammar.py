"""A grammar that a caller wrote, in the notation of llama.cpp (GBNF), which xgrammar and vLLM take too.

The runtime ends the process at a mistake in a grammar, and follows every way to read a text. So a grammar is checked
here, and read as one expression: its rules may refer to each other, but not to themselves.
"""

from __future__ import annotations

import re

from worker_node.structured_output.ebnf import MAX_CODE, complement
from worker_node.structured_output.regular import Term, characters, either, row, text, times

MAX_GRAMMAR_CHARACTERS = 32 * 1024
MAX_RULES = 500
# Of the expression, with each rule written out wherever it is referred to.
_MAX_PARTS = 40_000
_MAX_DEPTH = 50

_TOKEN = re.compile(
    r'(?:\s|\#[^\n]*)+|(?P<name>[A-Za-z_-][\w-]*)|(?P<is>::=)|"(?P<literal>(?:[^"\\\n]|\\.)*)"'
    r"|\[(?P<set>(?:[^\]\\\n]|\\.)*)\]|(?P<count>\{\s*(?P<least>\d{1,7})\s*(?P<comma>,?)\s*(?P<most>\d{0,7})\s*\}|[*+?])"
    r"|(?P<sign>[()|.])",
    re.ASCII,
)
_UNIT = r"(\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.)"
_UNITS = re.compile(_UNIT, re.DOTALL)
_RANGES = re.compile(f"{_UNIT}(?:-{_UNIT})?", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class GrammarRefused(ValueError):
    """The grammar is wrong, or uses what cannot be enforced."""


def grammar_term(source: str) -> Term:
    """The texts that the grammar's `root` admits. Raises GrammarRefused."""
    return _Expansion(_read(source)).of("root")


class _Expansion:
    """Writes out the rules that a rule refers to."""

    def __init__(self, rules: dict[str, Term]) -> None:
        self._rules = rules
        self._open: list[str] = []
        self._parts = 0

    def of(self, name: str) -> Term:
        """The whole expression of a rule."""
        if name not in self._rules:
            raise GrammarRefused(f"there is no rule {name[:100]!r}")
        if name in self._open:
            raise GrammarRefused(
                f"the rule {name[:100]!r} refers to itself; write a repetition with * or + instead, and nested forms "
                "as a JSON schema"
            )
        self._open.append(name)
        term = self._expanded(self._rules[name])
        self._open.pop()
        return term

    def _expanded(self, term: Term) -> Term:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise GrammarRefused(f"with its rules written out it has more than {_MAX_PARTS} parts, the bound here")
        match term:
            case ("name", name):
                return self.of(name)
            case ("row", terms):
                return row(map(self._expanded, terms))
            case ("any", terms):
                return either(map(self._expanded, terms))
            case ("times", inner, least, most):
                return times(self._expanded(inner), least, None if most == -1 else most)
        return term


def _read(source: str) -> dict[str, Term]:
    """The rules by name, in their order."""
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(f"it has {len(source)} characters, the bound here is {MAX_GRAMMAR_CHARACTERS}")
    reader = _Reader(_tokens(source))
    rules: dict[str, Term] = {}
    while not reader.at_end:
        name, term = reader.rule()
        if name in rules:
            raise GrammarRefused(f"the rule {name[:100]!r} is defined twice")
        rules[name] = term
    if "root" not in rules:
        raise GrammarRefused('it has no rule root; write rules as in: root ::= "yes" | "no"')
    if len(rules) > MAX_RULES:
        raise GrammarRefused(f"it has {len(rules)} rules, the bound here is {MAX_RULES}")
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


class _Reader:
    """Reads tokens, of which each one's last group says its kind."""

    def __init__(self, tokens: list[re.Match[str]]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    @property
    def at_end(self) -> bool:
        return self._next >= len(self._tokens)

    def _shows(self, kind: str, sign: str | None = None, *, ahead: int = 0) -> bool:
        if self._next + ahead >= len(self._tokens):
            return False
        token = self._tokens[self._next + ahead]
        return token.lastgroup == kind and sign in {None, token[0]}

    def _take(self) -> re.Match[str]:
        self._next += 1
        return self._tokens[self._next - 1]

    def rule(self) -> tuple[str, Term]:
        if not (self._shows("name") and self._shows("is", ahead=1)):
            raise GrammarRefused(f'a rule is expected, as in root ::= "yes", where {self._take()[0][:40]!r} stands')
        name = self._take()[0]
        self._take()
        return name, self._choice(name)

    def _choice(self, rule: str) -> Term:
        options = [self._row(rule)]
        while self._shows("sign", "|"):
            self._take()
            options.append(self._row(rule))
        return either(options)

    def _row(self, rule: str) -> Term:
        terms: list[Term] = []
        while not (self.at_end or self._shows("sign", "|") or self._shows("sign", ")") or self._shows("is", ahead=1)):
            terms.append(self._counted(self._atom(rule), rule))
        return row(terms)

    def _atom(self, rule: str) -> Term:
        token = self._take()
        match token.lastgroup:
            case "name":
                return ("name", token[0])
            case "literal":
                return text("".join(chr(_code(unit)) for unit in _UNITS.findall(token["literal"])))
            case "set":
                return _set(token["set"], rule)
        if token[0] == ".":
            return characters([(0, MAX_CODE)])
        if token[0] != "(":
            raise GrammarRefused(f"unexpected {token[0]!r} in the rule {rule[:100]!r}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarRefused("groups are nested too deeply")
        inner = self._choice(rule)
        self._depth -= 1
        if not self._shows("sign", ")"):
            raise GrammarRefused(f"a group is not closed in the rule {rule[:100]!r}")
        self._take()
        return inner

    def _counted(self, term: Term, rule: str) -> Term:
        if not self._shows("count"):
            return term
        match = self._take()
        if self._shows("count"):
            raise GrammarRefused(f"two counts in a row in the rule {rule[:100]!r}")
        if match["least"] is None:
            return times(term, *_SIGNS[match[0]])
        least = int(match["least"])
        most = least if not match["comma"] else int(match["most"]) if match["most"] else None
        if most is not None and most < least:
            raise GrammarRefused(f"a count whose limits are the wrong way round in the rule {rule[:100]!r}")
        return times(term, least, most)


def _set(body: str, rule: str) -> Term:
    inverted = body.startswith("^")
    found = [(_code(low), _code(high or low)) for low, high in _RANGES.findall(body[inverted:])]
    if any(high < low for low, high in found):
        raise GrammarRefused(f"a range that is none in the rule {rule[:100]!r}")
    if not found and not inverted:
        raise GrammarRefused(f"a class without characters in the rule {rule[:100]!r}")
    return characters(complement(found) if inverted else found)


def _code(unit: str) -> int:
    """The code of a character, or of an escape for one."""
    escaped = _ESCAPES.get(unit[1:], unit[-1]) if len(unit) == 2 else unit
    code = ord(escaped) if len(unit) < 3 else int(unit[2:], 16)  # noqa: FURB166  # no prefix but an escape
    if code > MAX_CODE or 0xD800 <= code <= 0xDFFF:
        raise GrammarRefused(f"{unit} is no character")
    return code
