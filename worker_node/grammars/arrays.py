"""Arrays of a schema as EBNF: items that have a place of their own, then items of one schema."""

from __future__ import annotations

import math
from typing import Any

from worker_node.errors import UnsupportedParameter
from worker_node.grammars.budget import OutOfSteps
from worker_node.grammars.ebnf import Rules, json_literal
from worker_node.grammars.members import MAX_COUNT, Member, containing, in_order, in_order_counted, listed
from worker_node.grammars.merging import ANNOTATIONS, comparable
from worker_node.grammars.merging_objects import Schema, both_parts
from worker_node.grammars.objects import Compiler
from worker_node.grammars.refusals import CannotEnforce, NothingAdmitted
from worker_node.grammars.repetition import repeated

# Up to so many constants a list without repeats has them in any order: a rule for each of their sets.
_ANY_ORDER = 6
_MOST_NUMBERS = 64


def array_of(compiler: Compiler, schema: Schema, path: str) -> str:
    """The rule of an array. Raises UnsupportedParameter, BadRequest."""
    least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
    most = None if most is None else int(most)
    if most is not None and most < least:
        raise NothingAdmitted(path, "maxItems is below minItems")
    if least > MAX_COUNT:
        raise CannotEnforce(path, "minItems", f"{least} cannot be enforced, the bound here is {MAX_COUNT}")
    if schema.get("uniqueItems") and (most is None or most > 1):
        return _unique(compiler, schema, path, least, most)
    if "contains" in schema and (schema.get("minContains", 1) or "maxContains" in schema):
        return _containing(compiler, schema, path, (least, most))
    rules = compiler.rules
    if not schema.get("prefixItems"):
        item = None if most == 0 else _rule(compiler, schema.get("items", True), f"{path}.items")
        if item is not None:
            return rules.add("array", f'"[" ws {listed(rules, item, least, most)} ws "]"')
        if least:
            raise NothingAdmitted(path)
        return '("[" ws "]")'
    return _in_places(compiler, schema, path, least, most)


def _in_places(compiler: Compiler, schema: Schema, path: str, least: int, most: int | None) -> str:
    """All of the items that have a place are written, as far as may be, and none after them unless asked for."""
    rules = compiler.rules
    first: list[str] = []
    for i, part in enumerate(schema["prefixItems"]):
        item = None if most == i else _rule(compiler, part, f"{path}.prefixItems[{i}]")
        if item is None:
            if least > i:
                raise NothingAdmitted(f"{path}.prefixItems[{i}]")
            return rules.add("array", f'"[" ws {_joined(first)} ws "]"')
        first.append(item)
    body = _joined(first)
    # Where more items are needed, whatever may come after the places is written.
    others = schema.get("items", least > len(first))
    item = None if most == len(first) else _rule(compiler, others, f"{path}.items")
    if item is not None:
        following = rules.add("next", f'ws "," ws {item}')
        high = None if most is None else min(most - len(first), MAX_COUNT)
        body += " " + repeated(rules, following, max(0, least - len(first)), high)
    elif least > len(first):
        raise NothingAdmitted(path)
    return rules.add("array", f'"[" ws {body} ws "]"')


def _joined(items: list[str]) -> str:
    return ' ws "," ws '.join(items) or '""'


def _rule(compiler: Compiler, schema: Any, path: str) -> str | None:
    try:
        return compiler.inside(schema, path)
    except NothingAdmitted:
        return None


def _containing(compiler: Compiler, schema: Schema, path: str, length: tuple[int, int | None]) -> str:
    if "prefixItems" in schema:
        raise CannotEnforce(path, "contains", "cannot be enforced beside prefixItems")
    wanted, items = schema["contains"], schema.get("items", True)
    most = schema.get("maxContains")
    found = int(schema.get("minContains", 1)), None if most is None else int(most)
    if found[1] is not None and found[1] < found[0]:
        raise NothingAdmitted(path, "maxContains is below minContains")
    match = _rule(compiler, both_parts([items, wanted]), f"{path}.contains")
    try:
        other = _rule(compiler, both_parts([items, {"not": wanted}]), f"{path}.contains")
    except OutOfSteps:
        raise
    except UnsupportedParameter as error:
        if found[1] is not None:
            raise CannotEnforce(path, "maxContains", f"cannot be enforced ({error.message})") from None
        other = _rule(compiler, items, f"{path}.items")
    try:
        body = containing(compiler.rules, match, other, found, length, compiler.spend)
    except ValueError as error:
        raise CannotEnforce(path, "contains", f"cannot be enforced: {error}") from None
    if body is None:
        raise NothingAdmitted(path, "no list contains what it has to")
    return compiler.rules.add("array", f'"[" ws {body} ws "]"')


def _unique(compiler: Compiler, schema: Schema, path: str, least: int, most: int | None) -> str:
    """A list out of constants: each at most once. Many of them come in the order in which they are declared."""
    constants = None if {"prefixItems", "contains"} & schema.keys() else _constants(compiler, schema, path)
    if constants is None:
        raise CannotEnforce(
            path,
            "uniqueItems",
            "can be enforced only where items are constants or whole numbers of a short range, or maxItems is 1",
        )
    rules = compiler.rules
    if len(constants) <= _ANY_ORDER:
        body = _in_any_order(rules, [json_literal(value) for value in constants], least, most)
        if body is None:
            raise NothingAdmitted(path, "there are fewer constants than the list needs")
        return rules.add("array", f'"[" ws {body} ws "]"')
    members = [Member(json_literal(value), needed=False) for value in constants]
    if not least and (most is None or most >= len(members)):
        return rules.add("array", f'"[" ws {in_order(rules, members)} ws "]"')
    try:
        body = in_order_counted(rules, members, None, least, most, compiler.spend)
    except ValueError as error:
        raise CannotEnforce(path, "uniqueItems", f"cannot be enforced: {error}") from None
    if body is None:
        raise NothingAdmitted(path, "there are fewer constants than the list needs")
    return rules.add("array", f'"[" ws {body} ws "]"')


def _in_any_order(rules: Rules, literals: list[str], least: int, most: int | None) -> str | None:
    """Each at most once, in any order: a rule for each set of those that are left. None if there are too few."""
    if len(literals) < least:
        return None
    highest = len(literals) if most is None else min(most, len(literals))

    def rest(left: tuple[str, ...], *, first: bool) -> str:
        count = len(literals) - len(left)
        comma = "" if first else 'ws "," ws '
        options = []
        if count < highest:
            options = [
                f"{comma}{one} {rest((*left[:index], *left[index + 1 :]), first=False)}"
                for index, one in enumerate(left)
            ]
        return rules.add("left", " | ".join([*options, *(['""'] if count >= least else [])]))

    return rest(tuple(literals), first=True)


def _constants(compiler: Compiler, schema: Schema, path: str) -> list[Any] | None:
    """The values that items may have, if they are constants."""
    found: dict[str, Any] = {}
    for one in compiler.alternatives(schema.get("items", True), f"{path}.items"):
        values: list[Any] | None = compiler.constants(one, f"{path}.items") if "enum" in one else None
        if values is None and one.get("type") in ("boolean", "null"):  # may be a list
            values = [False, True] if one["type"] == "boolean" else [None]
        if values is None and one.get("type") == "integer":
            values = _whole_numbers(one)
        if values is None:
            return None
        found |= {comparable(value): value for value in values}
    return list(found.values())


def _whole_numbers(plain: Schema) -> list[Any] | None:
    """The numbers between two bounds, if they are few and nothing else counts."""
    if plain.keys() - ANNOTATIONS - {"type", "minimum", "maximum"} or not {"minimum", "maximum"} <= plain.keys():
        return None
    low, high = math.ceil(plain["minimum"]), math.floor(plain["maximum"])
    return list(range(low, high + 1)) if 0 <= high - low < _MOST_NUMBERS else None
