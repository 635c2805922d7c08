"""The bounds on one request's schemas: the work of translating them, and what their grammar costs the runtime.

The cost is estimated from the grammar's text without expanding anything. docs/schemas.md says how it was measured.

**Compiling.** The runtime makes a state of every place in a rule and tests the vocabulary against what can come next
there, counted repetition spelt out. A class that admits most characters lets whole tokens through and is dear; a fixed
character stops them at once. So the cost is the sum, over all places, of the weights of what can follow.

**Each token.** A token that runs over the end of a rule is tested again for each token that is generated, in each of
the counts that the text so far may be in. So the width is the number of counts of wide classes that can be open at
once.

The text is read once, rules that refer to later ones twice, however much the counts multiply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from worker_node.core.errors import UnsupportedParameter
from worker_node.structured_output.ebnf import JSON_RULES

MAX_DEPTH = 64
MAX_SCHEMA_BYTES = 256 * 1024
MAX_GRAMMAR_CHARACTERS = 200_000
# A step is one keyword, name, value or merged part that is looked at: 1 to 2 microseconds.
MAX_STEPS = 200_000
MAX_COST = 100_000
MAX_WIDTH = 32

# Weights by how many characters a class admits; a fixed character weighs 1.
_CLASS_WEIGHTS = ((2, 1), (16, 4), (40, 150), (100, 400))
_WIDE_WEIGHT = 1000
_NARROW_WEIGHT = 4
# The runtime shares what it finds out about fixed characters between the places before them.
_SPREAD = 8
# A reference to a rule that itself begins with one: nothing is tested there.
_REFERENCE_WEIGHT = 2
# Names of rules whose alternatives soon differ: the members of an object, and choices distinguished by a tag.
EXCLUSIVE = ("members", "more", "rest", "choice")

_TOKEN = re.compile(
    r'(?P<name>[A-Za-z]\w*)|"(?P<literal>(?:[^"\\]|\\.)*)"|(?P<class>\[(?:[^\]\\]|\\.)*\])'
    r"|\{(?P<least>\d+)(?P<comma>,?)(?P<most>\d*)\}|(?P<sign>[()|*+?])"
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
            raise UnsupportedParameter(
                f"{self._where}: translating the schema takes more than {self._most} steps, the bound here; "
                "use fewer or smaller parts, above all under allOf, oneOf and $ref",
                param=self._where,
            )


def too_large(path: str, size: int) -> UnsupportedParameter:
    """The error for a grammar of `size` characters or more."""
    return UnsupportedParameter(
        f"{path}: the schema is too large to be enforced: its grammar has {size} characters or more, the bound here is "
        f"{MAX_GRAMMAR_CHARACTERS}",
        param=path,
    )


def check_cost(grammar: str, where: str) -> None:
    """Raise UnsupportedParameter, naming `where`, for a grammar that is over a bound."""
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise too_large(where, len(grammar))
    cost = grammar_cost(grammar)
    if cost.compiling > MAX_COST:
        raise UnsupportedParameter(
            f"{where}: enforcing it costs {cost.compiling} units, the bound here is {MAX_COST}; use fewer "
            "different counts (minLength, maxLength, {n} in a pattern), or smaller ones, or fewer alternatives",
            param=where,
        )
    if cost.width > MAX_WIDTH:
        raise UnsupportedParameter(
            f"{where}: {cost.width} counted texts can be open at the same place, the bound here is {MAX_WIDTH}; use "
            "fewer alternatives with minLength, maxLength or {n} in a pattern, or tell them apart by the first key",
            param=where,
        )


class _Part(NamedTuple):
    """A piece of a rule.

    `places`: the weights inside, summed; `first`: of what can come first; `ends`: how many places can come last;
    `empty`: whether it may be nothing; `width`: how many counts of wide classes can be open in it at once.
    """

    places: int = 0
    first: int = 0
    ends: int = 0
    empty: bool = True
    width: int = 0
    # What of `first` stands here itself; and all of it that is narrow, behind references too.
    direct: int = 0
    narrow: int = 0

    def then(self, other: _Part) -> _Part:
        """This, and the other after it."""
        return _Part(
            self.places + other.places + self.ends * other.first,
            self.first + (other.first if self.empty else 0),
            other.ends + (self.ends if other.empty else 0),
            self.empty and other.empty,
            max(self.width, other.width),
            self.direct + (other.direct if self.empty else 0),
            self.narrow + (other.narrow if self.empty else 0),
        )

    def either(self, other: _Part, *, exclusive: bool) -> _Part:
        """This or the other; `exclusive`: the text shows soon which."""
        return _Part(
            self.places + other.places,
            self.first + other.first,
            self.ends + other.ends,
            self.empty or other.empty,
            max(self.width, other.width) if exclusive else self.width + other.width,
            self.direct + other.direct,
            self.narrow + other.narrow,
        )

    def repeated(self, least: int, most: int | None) -> _Part:
        """This, repeated."""
        copies = max(1, least if most is None else most)
        # What can be empty is followed by all later copies, not only by the next one.
        followers = copies * (copies - 1) // 2 if self.empty else copies - 1
        loops = followers + (1 if most is None else 0)
        last = copies - max(1, 1 if self.empty else least) + 1 if most is not None else 1
        return _Part(
            copies * self.places + loops * self.ends * self.first,
            self.first * (copies if self.empty else 1),
            self.ends * last,
            self.empty or least == 0,
            # The weight of a class is that of a reference to it: such a count is open while its text is written.
            max(self.width, int(most is not None and copies > 1 and self.first >= _WIDE_WEIGHT)),
            self.direct,
            self.narrow,
        )

    def referenced(self) -> _Part:
        """A reference to a rule that is this: only what can come first counts, its places are counted with the rule."""
        # A wide class behind further references is tested there; what is narrow is tested from here on.
        first = self.direct + self.narrow // _SPREAD + _REFERENCE_WEIGHT
        return _Part(0, first, 1, self.empty, self.width, 0, self.narrow)


_NOTHING = _Part()
# A rule that is not read yet: it is dear, and not empty.
_UNREAD = _Part(0, _WIDE_WEIGHT, 1, empty=False, direct=_WIDE_WEIGHT)


class Cost(NamedTuple):
    """`compiling` in units of about ten microseconds; `width` in counts of wide classes that can be open at once."""

    compiling: int
    width: int


def grammar_cost(grammar: str) -> Cost:
    """Return the cost of an EBNF text of this package."""
    bodies = dict(line.split(" ::= ", 1) for line in grammar.splitlines())
    own = {name: body for name, body in bodies.items() if JSON_RULES.get(name) != body}
    parts = _rule_parts(own, _json_rules()).values()
    return Cost(sum(part.places + part.first for part in parts), max(part.width for part in parts))


@cache
def _json_rules() -> dict[str, _Part]:
    return _rule_parts(JSON_RULES, {})


def _rule_parts(bodies: Mapping[str, str], known: Mapping[str, _Part]) -> dict[str, _Part]:
    """The parts that the rules are, by name, with those that are known already."""
    parts = dict(known)
    # The root, which comes first, refers to all others.
    first, *others = bodies
    early = [name for name in [*others, first] if not _read_rule(name, bodies[name], parts)]
    for name in early:
        _read_rule(name, bodies[name], parts)
    return parts


def _read_rule(name: str, body: str, parts: dict[str, _Part]) -> bool:
    """Add the part that a rule is; returns whether all rules that it refers to are known."""
    tokens = list(_TOKEN.finditer(body))
    known = all(token["name"] is None or token["name"] in parts for token in tokens)
    parts[name] = _part_of(tokens, parts, exclusive=name.startswith(EXCLUSIVE))
    return known


def _part_of(tokens: Iterable[re.Match[str]], rules: Mapping[str, _Part], *, exclusive: bool) -> _Part:
    """The body of one rule as one part. Without recursion: groups may be nested deeply."""
    # Each frame holds the options so far and the open sequence.
    frames: list[tuple[_Part | None, _Part]] = []
    options: _Part | None = None
    sequence = last = _NOTHING

    def joined() -> _Part:
        whole = sequence.then(last)
        return whole if options is None else options.either(whole, exclusive=exclusive)

    for token in tokens:
        sign = token["sign"]
        if sign == "(":
            frames.append((options, sequence.then(last)))
            options, sequence, last = None, _NOTHING, _NOTHING
        elif sign == ")":
            last = joined()
            options, sequence = frames.pop()
        elif sign == "|":
            options, sequence, last = joined(), _NOTHING, _NOTHING
        elif sign is not None:
            last = last.repeated(*{"*": (0, None), "+": (1, None), "?": (0, 1)}[sign])
        elif token["least"] is not None:
            least = int(token["least"])
            last = last.repeated(least, least if not token["comma"] else int(token["most"]) if token["most"] else None)
        else:
            sequence, last = sequence.then(last), _atom(token, rules)
    return joined()


def _atom(token: re.Match[str], rules: Mapping[str, _Part]) -> _Part:
    if token["name"] is not None:
        return rules.get(token["name"], _UNREAD).referenced()
    if token["literal"] is not None:
        length = len(token["literal"])
        return _Part(length - 1, 1, 1, empty=False, direct=1, narrow=1) if length else _NOTHING
    weight = _class_weight(token["class"][1:-1])
    return _Part(0, weight, 1, empty=False, direct=weight, narrow=min(weight, _NARROW_WEIGHT))


def _class_weight(body: str) -> int:
    if body.startswith("^"):
        return _WIDE_WEIGHT
    count = sum(_code(high or low) - _code(low) + 1 for low, high in _RANGES.findall(body))
    return next((weight for most, weight in _CLASS_WEIGHTS if count <= most), _WIDE_WEIGHT)


def _code(unit: str) -> int:
    return int(unit[2:], 16) if len(unit) > 2 else ord(unit[-1])  # noqa: FURB166  # no prefix but an escape
