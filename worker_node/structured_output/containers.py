"""Objects and lists of a schema as EBNF.

Declared properties come in order, then others where they are asked for; items that have a place of their own, then
items of one schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from worker_node.structured_output.combining import both_parts
from worker_node.structured_output.ebnf import Rules, branches, compact_json, json_literal, literal
from worker_node.structured_output.keywords import CannotEnforce, NothingAdmitted, Schema, comparable
from worker_node.structured_output.pattern import PatternRefused, pattern_term
from worker_node.structured_output.regular import (
    EVERYTHING,
    Term,
    TooManyStates,
    both,
    either,
    matches,
    regular_to_ebnf,
    row,
    text,
    without,
)
from worker_node.structured_output.scalars import string_term

if TYPE_CHECKING:
    from worker_node.structured_output.schema import Compiler

MAX_COUNT = 2048
# Characters of all declared keys together by which other keys are distinguished from them.
_DISTINGUISHING_CHARACTERS = 60
# The most constants that a list without repeats may have in any order: each of their sets needs a rule.
_ANY_ORDER = 6
_MOST_NUMBERS = 64


class _Member(NamedTuple):
    """`text`: its rule; `needed`: whether it may be left out."""

    text: str
    needed: bool


def object_of(compiler: Compiler, schema: Schema, path: str) -> str:
    """The rule of an object. Raises UnsupportedParameter, BadRequest."""
    keys = _Keys(compiler, schema, path)
    declared, needed = schema.get("properties", {}), dict.fromkeys(schema.get("required", ()))
    members = []
    for name in dict.fromkeys([*declared, *needed]):
        value = compiler.inside(keys.value_of(name), f"{path}.properties.{name[:100]}")
        if value is not None:
            members.append(_Member(f'{json_literal(name)} ws ":" ws {value}', name in needed))
        elif name in needed:
            raise NothingAdmitted(f"{path}.properties.{name[:100]}")
    others = keys.others([*declared, *needed])
    least = int(schema.get("minProperties", 0))
    most = None if "maxProperties" not in schema else int(schema["maxProperties"])
    rules = compiler.rules
    if (most is not None and most < max(least, len(needed))) or (others is None and len(members) < least):
        raise NothingAdmitted(path, "no object has that many properties")
    # An undeclared key may be repeated, so that several count as one.
    if least > max(1, len(needed)):
        raise CannotEnforce(path, "minProperties", "more than one cannot be enforced beyond the required properties")
    if members or others is None:
        if most is not None and (others is not None or most < len(members)):
            raise CannotEnforce(path, "maxProperties", "cannot be enforced beside as many declared properties")
        body = _in_order(rules, members, others, least=bool(least))
    else:
        body = '""' if most == 0 else _listed(rules, others, least, most)
    return rules.add("object", f'"{{" ws {body} ws "}}"')


class _Keys:
    """The schema of the value of each key."""

    def __init__(self, compiler: Compiler, schema: Schema, path: str) -> None:
        self._compiler = compiler
        self._schema = schema
        self._path = path
        patterns = schema.get("patternProperties", {})
        try:
            # What every dialect of expressions matches, and what any does.
            self._sure = [pattern_term(pattern, search=True) for pattern in patterns]
            self._wide = [pattern_term(pattern, search=True, wide=True) for pattern in patterns]
        except PatternRefused as error:
            raise CannotEnforce(path, "patternProperties", f"cannot be enforced: {error}") from None
        self._parts = list(patterns.values())
        try:
            names = compiler.alternatives(schema.get("propertyNames", True), f"{path}.propertyNames")
            self._names = either(string_term(one) for one in names)
        except PatternRefused as error:
            raise CannotEnforce(path, "propertyNames", f"cannot be enforced: {error}") from None

    def value_of(self, name: str) -> Any:
        """The schema of the value of a declared or required key."""
        if not self._matches(self._names, name):
            return False
        # What only some dialects match is held to both ways.
        parts = [part for wide, part in zip(self._wide, self._parts, strict=True) if self._matches(wide, name)]
        declared = self._schema.get("properties", {})
        if name in declared:
            parts.append(declared[name])
        elif not any(self._matches(sure, name) for sure in self._sure):
            parts.append(self._schema.get("additionalProperties", True))
        return both_parts(parts)

    def _matches(self, term: Term, name: str) -> bool:
        return term == EVERYTHING or matches(term, name, self._compiler.spend)

    def others(self, named: list[str]) -> str | None:
        """The rule of a member whose key is none of the named ones; None if none is written."""
        excluded = without(either(_beginnings(named)))
        members = []
        for term, schema in self._classes(named):
            value = self._compiler.inside(schema, f"{self._path}.additionalProperties")
            if value is not None and (key := self._key(both([term, self._names, excluded]))):
                members.append(f'{key} ws ":" ws {value}')
        return self._compiler.rules.add("member", " | ".join(members)) if members else None

    def _key(self, term: Term) -> str | None:
        if term == EVERYTHING:
            return "string"
        rules = self._compiler.rules
        try:
            inner = regular_to_ebnf(term, rules, self._compiler.spend)
        except TooManyStates as error:
            keywords = ("patternProperties", "propertyNames", "additionalProperties")
            keyword = next(key for key in keywords if key in self._schema)
            raise CannotEnforce(self._path, keyword, f"cannot be enforced: {error}") from None
        return None if inner is None else rules.add("key", f'"\\"" {inner} "\\""')

    def _classes(self, named: list[str]) -> Iterator[tuple[Term, Any]]:
        """Keys that match one pattern alone, and those that match none, with the schema of their values."""
        for index, part in enumerate(self._parts):
            alone = [without(wide) for place, wide in enumerate(self._wide) if place != index]
            yield both([self._sure[index], *alone]), part
        # Declared properties, if only that there are none, close an object: a tool without arguments gets none.
        is_open = "properties" not in self._schema and not named and not self._parts
        others = self._schema.get("additionalProperties", is_open)
        # Beside declared properties, others are written only when there is a schema for them.
        if others not in (True, {}) or (not self._parts and not named):
            yield both(map(without, self._wide)), others


def _beginnings(names: list[str]) -> list[Term]:
    """The names, or all keys with their beginnings where there are many: each character of a name costs a state."""
    if sum(map(len, names)) <= _DISTINGUISHING_CHARACTERS:
        return [text(name) for name in names]
    most = max(1, _DISTINGUISHING_CHARACTERS // len(names))
    return [row([text(name[:most]), EVERYTHING]) if len(name) > most else text(name) for name in names]


def _listed(rules: Rules, item: str, least: int, most: int | None) -> str:
    """Items of one kind, with commas."""
    following = rules.add("next", f'ws "," ws {item}')
    rest = rules.repeated(following, max(0, least - 1), None if most is None else min(most, MAX_COUNT) - 1)
    return f"({item} {rest})" if least else f"({item} {rest})?"


def _in_order(rules: Rules, members: list[_Member], others: str | None = None, *, least: bool = False) -> str:
    """Members in order, those that are not needed left out or not, then any number of others; with `least`, any."""
    if others is None:
        rest, begun = None if least else '""', '""'
    else:
        rest, begun = _listed(rules, others, int(least), None), f'(ws "," ws {others})*'
    for member in reversed(members):
        name = rules.add("member", member.text)
        after = rules.add("more", begun)
        without = "" if member.needed or rest is None else f" | {rules.add('rest', rest)}"
        rest = f"{name} {after}{without}"
        begun = f'ws "," ws {name} {after}' if member.needed else f'(ws "," ws {name})? {after}'
    return rules.add("members", rest or '""')


def array_of(compiler: Compiler, schema: Schema, path: str) -> str:
    """The rule of a list. Raises UnsupportedParameter, BadRequest."""
    least = int(schema.get("minItems", 0))
    most = None if "maxItems" not in schema else int(schema["maxItems"])
    if most is not None and most < least:
        raise NothingAdmitted(path, "maxItems is below minItems")
    if least > MAX_COUNT:
        raise CannotEnforce(path, "minItems", f"{least} cannot be enforced, the bound here is {MAX_COUNT}")
    rules = compiler.rules
    if schema.get("uniqueItems") and (most is None or most > 1):
        body = _unique(compiler, schema, path, (least, most))
    else:
        body = _items(compiler, schema, path, least, most)
    return rules.add("array", f'"[" ws {body} ws "]"')


def _items(compiler: Compiler, schema: Schema, path: str, least: int, most: int | None) -> str:
    """All items that have a place are written, as far as may be, and none after them unless asked for."""
    rules = compiler.rules
    first: list[str] = []
    for index, part in enumerate(schema.get("prefixItems", ())):
        item = None if most == index else compiler.inside(part, f"{path}.prefixItems[{index}]")
        if item is None:
            if least > index:
                raise NothingAdmitted(f"{path}.prefixItems[{index}]")
            return ' ws "," ws '.join(first) or '""'
        first.append(item)
    # Where more items are needed, whatever may come after the places is written.
    others = schema.get("items", least > len(first) or not first)
    item = None if most == len(first) else compiler.inside(others, f"{path}.items")
    if item is None and least > len(first):
        raise NothingAdmitted(path)
    places = ' ws "," ws '.join(first)
    if item is None:
        return places or '""'
    if not first:
        return _listed(rules, item, least, most)
    following = rules.add("next", f'ws "," ws {item}')
    high = None if most is None else min(most - len(first), MAX_COUNT)
    return f"{places} {rules.repeated(following, max(0, least - len(first)), high)}"


def _unique(compiler: Compiler, schema: Schema, path: str, counts: tuple[int, int | None]) -> str:
    """Items out of constants, each at most once. Many of them come in the order in which they are declared."""
    constants = None if "prefixItems" in schema else _constants(compiler, schema, path)
    if constants is None:
        raise CannotEnforce(
            path,
            "uniqueItems",
            "can be enforced only where items are constants or whole numbers of a short range, or maxItems is 1",
        )
    rules, (least, most) = compiler.rules, counts
    if len(constants) < least:
        raise NothingAdmitted(path, "there are fewer constants than the list needs")
    texts = [compact_json(value) for value in constants]
    if len(constants) <= _ANY_ORDER:
        return _in_any_order(rules, texts, least, len(texts) if most is None else most)
    members = [_Member(literal(one), needed=False) for one in texts]
    if least > 1 or (most is not None and most < len(members)):
        raise CannotEnforce(path, "uniqueItems", f"cannot be enforced with a count of more than {_ANY_ORDER} constants")
    return _in_order(rules, members, least=bool(least))


def _in_any_order(rules: Rules, texts: list[str], least: int, most: int) -> str:
    """Each at most once, in any order: a rule for each set of those that are left."""

    def rest(left: tuple[str, ...], count: int) -> str:
        options = []
        if left and count < most:
            items = branches(
                {one: rest((*left[:index], *left[index + 1 :]), count + 1) for index, one in enumerate(left)}
            )
            options.append(f'ws "," ws ({items})' if count else items)
        return rules.add("left", " | ".join([*options, *(['""'] if count >= least else [])]))

    return rest(tuple(texts), 0)


def _constants(compiler: Compiler, schema: Schema, path: str) -> list[Any] | None:
    """The values that items may have, if they are constants."""
    found: dict[str, Any] = {}
    for one in compiler.alternatives(schema.get("items", True), f"{path}.items"):
        if "enum" in one:
            values: list[Any] | None = compiler.constants(one, f"{path}.items")
        elif one.get("type") in ("boolean", "null"):
            values = [False, True] if one["type"] == "boolean" else [None]
        else:
            values = _whole_numbers(one)
        if values is None:
            return None
        found |= {comparable(value): value for value in values}
    return list(found.values())


def _whole_numbers(plain: Schema) -> list[Any] | None:
    """The whole numbers between two bounds, if they are few and nothing else counts."""
    if plain.keys() - {"format"} != {"type", "minimum", "maximum"} or plain["type"] != "integer":
        return None
    low, high = math.ceil(plain["minimum"]), math.floor(plain["maximum"])
    return list(range(low, high + 1)) if 0 <= high - low < _MOST_NUMBERS else None
