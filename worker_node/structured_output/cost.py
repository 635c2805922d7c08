"""The bounds on one request's schemas: the work of translating them, and what their grammar costs the runtime.

The runtime makes a state of every place in a rule, counted repetition spelt out, and tests the vocabulary against what
can come there. A class that admits most characters lets whole tokens through and is dear; a fixed character stops them
at once. So the cost is the sum of the places, by what they admit. A token that runs over the end of a count is tested
again for each token that is generated, so there is a bound on the number of different counts.

docs/schemas.md says how this was measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from worker_node.core.errors import UnsupportedParameter
from worker_node.structured_output.ebnf import JSON_RULES

MAX_DEPTH = 64
MAX_SCHEMA_BYTES = 256 * 1024
MAX_GRAMMAR_CHARACTERS = 200_000
# A step is one keyword, name, value or merged part that is looked at: 1 to 2 microseconds.
MAX_STEPS = 200_000
MAX_COST = 100_000
# One or two for each length. With 24 lengths at one place a token takes 0.2 s, with 112 it takes 2.5 s.
MAX_COUNT_RULES = 48

# Weights by how many characters a class admits; a fixed character weighs 1.
_CLASS_WEIGHTS = ((2, 1), (16, 4), (40, 150), (100, 400))
_WIDE_WEIGHT = 1000
# A reference to a rule that does not begin with a class: what is in it is counted with the rule.
_REFERENCE_WEIGHT = 2

_TOKEN = re.compile(
    r'(?P<name>[A-Za-z]\w*)|"(?P<literal>(?:[^"\\]|\\.)*)"|(?P<class>\[(?:[^\]\\]|\\.)*\])'
    r"|\{(?P<least>\d+),?(?P<most>\d*)\}|(?P<sign>[()])"
)
_UNIT = r"(\\U[0-9a-fA-F]{8}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|[^\\])"
_RANGES = re.compile(f"{_UNIT}(?:-{_UNIT})?", re.DOTALL)


class Budget:
    """Counts the steps of one translation. `where` is the schema's place in the request."""

    def __init__(self, where: str, steps: int = MAX_STEPS) -> None:
        self._where = where
        self._most = steps
        self.spent = 0

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises UnsupportedParameter beyond the bound."""
        self.spent += steps
        if self.spent > self._most:
            raise UnsupportedParameter.at(
                self._where,
                f"translating the schema takes more than {self._most} steps, the bound here; "
                "use fewer or smaller parts, above all under allOf, oneOf and $ref",
            )


def too_large(path: str, size: int) -> UnsupportedParameter:
    return UnsupportedParameter.at(
        path,
        f"the schema is too large to be enforced: its grammar has {size} characters or more, the bound here is "
        f"{MAX_GRAMMAR_CHARACTERS}",
    )


def check_cost(grammar: str, where: str) -> None:
    """Raise UnsupportedParameter, naming `where`, for a grammar that is over a bound."""
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise too_large(where, len(grammar))
    rules = dict(line.split(" ::= ", 1) for line in grammar.splitlines())
    # A place that holds a reference to a class is tested as the class is.
    first = {name: _weight(token) for name, body in rules.items() if (token := _TOKEN.match(body.lstrip("(")))}
    # In units of about ten microseconds.
    cost = sum(_places(body, first) for name, body in rules.items() if JSON_RULES.get(name) != body)
    if cost > MAX_COST:
        raise UnsupportedParameter.at(
            where,
            f"enforcing it costs {cost} units, the bound here is {MAX_COST}; use fewer different counts "
            "(minLength, maxLength, {n} in a pattern), or smaller ones, or fewer alternatives",
        )
    if (counts := sum(name.startswith("upto") for name in rules)) > MAX_COUNT_RULES:
        raise UnsupportedParameter.at(
            where,
            f"its counts take {counts} rules, the bound here is {MAX_COUNT_RULES}; use fewer different values "
            "of maxLength, maxItems and {n} in patterns",
        )


def _places(body: str, first: Mapping[str, int]) -> int:
    """The weights of all places of a rule, counted repetition spelt out."""
    groups, last = [0], 0
    for token in _TOKEN.finditer(body):
        if token["sign"] == "(":
            groups.append(0)
        elif token["sign"]:
            last = groups.pop()
            groups[-1] += last
        elif token["least"]:
            groups[-1] += last * (max(1, int(token["most"] or token["least"])) - 1)
        else:
            last = first.get(token["name"], 0) if token["name"] else _weight(token)
            groups[-1] += last
    return sum(groups)


def _weight(token: re.Match[str]) -> int:
    if not token["class"]:
        return _REFERENCE_WEIGHT if token["literal"] is None else len(token["literal"])
    body = token["class"][1:-1]
    if body.startswith("^"):
        return _WIDE_WEIGHT
    count = sum(_code(high or low) - _code(low) + 1 for low, high in _RANGES.findall(body))
    return next((weight for most, weight in _CLASS_WEIGHTS if count <= most), _WIDE_WEIGHT)


def _code(unit: str) -> int:
    return int(unit[2:], 16) if len(unit) > 2 else ord(unit[-1])  # noqa: FURB166  # no prefix but an escape
