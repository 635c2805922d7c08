"""Objects and lists of a schema as EBNF.

An object has its declared properties in order, or any number of keys of one kind; a list has the items that have a
place of their own, then items of one schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worker_node.structured_output.ebnf import Rules, json_literal
from worker_node.structured_output.keywords import CannotEnforce, NothingAdmitted, Schema
from worker_node.structured_output.pattern import PatternRefused, pattern_term, term_to_ebnf
from worker_node.structured_output.regular import EVERYTHING, Term, both, either, matches
from worker_node.structured_output.scalars import string_term

if TYPE_CHECKING:
    from worker_node.structured_output.schema import Compiler

MAX_COUNT = 2048
_TOO_FEW = "minProperties asks for more properties than are declared, and no others are written here"


def object_of(compiler: Compiler, schema: Schema, path: str) -> str:
    """The rule of an object. Raises UnsupportedParameter, BadRequest."""
    needed = dict.fromkeys(schema.get("required", ()))
    declared = schema.get("properties", {})
    if declared or needed:
        body = _members(compiler, schema, path, declared, needed)
    else:
        body = _keys_of_one_kind(compiler, schema, path)
    return compiler.rules.add("object", f'"{{" ws {body} ws "}}"')


def _members(compiler: Compiler, schema: Schema, path: str, declared: dict[str, Any], needed: dict[str, None]) -> str:
    """Declared and required properties, and no others, even where the schema allows them."""
    if "patternProperties" in schema:
        raise CannotEnforce(path, "patternProperties", "cannot be enforced beside other properties")
    keys, others = _key_term(compiler, schema, path), schema.get("additionalProperties", True)
    members = []
    for name in dict.fromkeys([*declared, *needed]):
        where = f"{path}.properties.{name[:100]}"
        if keys == EVERYTHING or matches(keys, name, compiler.spend):
            value = compiler.inside(declared.get(name, others), where)
        else:
            value = NothingAdmitted(where, "propertyNames does not match the name")
        if isinstance(value, str):
            members.append((f'{json_literal(name)} ws ":" ws {value}', name in needed))
        elif name in needed:
            raise value
    least, most = _counts(schema, path, "Properties")
    if most is not None and most < len(needed):
        raise NothingAdmitted(path, "more properties are required than maxProperties allows")
    if len(members) < least:
        raise NothingAdmitted(path, _TOO_FEW)
    if least > max(1, len(needed)):
        raise CannotEnforce(path, "minProperties", "more than one cannot be enforced beyond the required properties")
    if most is not None and most < len(members):
        raise CannotEnforce(path, "maxProperties", "cannot be enforced beside as many declared properties")
    # The runtime compiles a row of optional members in quadratic time: 0.8 s for 440, 18 s for 1,500.
    compiler.spend((len(members) - len(needed)) ** 2)
    return _in_order(compiler.rules, members, any_one=least > 0)


def _in_order(rules: Rules, members: list[tuple[str, bool]], *, any_one: bool) -> str:
    """Members in order, those that are not needed left out or not; with `any_one`, not all of them."""
    rest, begun = None if any_one else '""', '""'
    for text, needed in reversed(members):
        name, after = rules.add("member", text), rules.add("more", begun)
        without = "" if needed or rest is None else f" | {rules.add('rest', rest)}"
        rest = f"{name} {after}{without}"
        begun = f'ws "," ws {name} {after}' if needed else f'(ws "," ws {name})? {after}'
    return rules.add("members", rest or '""')


def _keys_of_one_kind(compiler: Compiler, schema: Schema, path: str) -> str:
    """Any number of members, whose keys match one pattern or are any. A key may be repeated."""
    least, most = _counts(schema, path, "Properties")
    # A key may be repeated, so that several count as one.
    if least > 1:
        raise CannotEnforce(path, "minProperties", "more than one cannot be enforced beyond the required properties")
    keys, patterns = _key_term(compiler, schema, path), schema.get("patternProperties", {})
    # Declared properties, if only that there are none, close an object: a tool without arguments gets none.
    values = schema.get("additionalProperties", "properties" not in schema)
    if patterns:
        if len(patterns) > 1 or schema.get("additionalProperties") not in (None, True, False, {}):
            raise CannotEnforce(path, "patternProperties", "only one kind of key can be enforced")
        ((pattern, values),) = patterns.items()
        try:
            keys = both([keys, pattern_term(pattern, search=True)])
        except PatternRefused as error:
            raise CannotEnforce(path, "patternProperties", f"cannot be enforced: {error}") from None
    key = "string" if keys == EVERYTHING else _key(compiler, keys, path, "patternProperties" if patterns else "")
    value = None if most == 0 or key is None else compiler.inside(values, f"{path}.additionalProperties")
    if not isinstance(value, str):
        if least:
            raise NothingAdmitted(path, _TOO_FEW)
        return '""'
    return _listed(compiler.rules, compiler.rules.add("member", f'{key} ws ":" ws {value}'), least, most)


def _key_term(compiler: Compiler, schema: Schema, path: str) -> Term:
    """The keys that match `propertyNames`."""
    try:
        names = compiler.alternatives(schema.get("propertyNames", True), f"{path}.propertyNames")
        return either(string_term(one) for one in names)
    except PatternRefused as error:
        raise CannotEnforce(path, "propertyNames", f"cannot be enforced: {error}") from None


def _key(compiler: Compiler, keys: Term, path: str, keyword: str) -> str | None:
    try:
        inner = term_to_ebnf(keys, compiler.rules, compiler.spend)
    except PatternRefused as error:
        raise CannotEnforce(path, keyword or "propertyNames", f"cannot be enforced: {error}") from None
    return None if inner is None else compiler.rules.add("key", f'"\\"" {inner} "\\""')


def _counts(schema: Schema, path: str, what: str) -> tuple[int, int | None]:
    least = int(schema.get(f"min{what}", 0))
    most = None if f"max{what}" not in schema else int(schema[f"max{what}"])
    if most is not None and most < least:
        raise NothingAdmitted(path, f"max{what} is below min{what}")
    return least, most


def _listed(rules: Rules, item: str, least: int, most: int | None) -> str:
    """Items of one kind, with commas."""
    following = rules.add("next", f'ws "," ws {item}')
    rest = rules.repeated(following, max(0, least - 1), None if most is None else min(most, MAX_COUNT) - 1)
    return f"({item} {rest})" if least else f"({item} {rest})?"


def array_of(compiler: Compiler, schema: Schema, path: str) -> str:
    """The rule of a list. Raises UnsupportedParameter, BadRequest."""
    least, most = _counts(schema, path, "Items")
    if least > MAX_COUNT:
        raise CannotEnforce(path, "minItems", f"{least} cannot be enforced, the bound here is {MAX_COUNT}")
    if schema.get("uniqueItems") and (most is None or most > 1):
        raise CannotEnforce(path, "uniqueItems", "can be enforced only where maxItems is 1")
    body = _items(compiler, schema, path, least, most)
    return compiler.rules.add("array", f'"[" ws {body} ws "]"')


def _items(compiler: Compiler, schema: Schema, path: str, least: int, most: int | None) -> str:
    """All items that have a place are written, as far as may be, and none after them unless asked for."""
    rules = compiler.rules
    first: list[str] = []
    for index, part in enumerate(schema.get("prefixItems", ())):
        item = None if most == index else compiler.inside(part, f"{path}.prefixItems[{index}]")
        if not isinstance(item, str):
            if isinstance(item, NothingAdmitted) and least > index:
                raise item
            return ' ws "," ws '.join(first) or '""'
        first.append(item)
    # Where more items are needed, whatever may come after the places is written.
    others = schema.get("items", least > len(first) or not first)
    item = None if most == len(first) else compiler.inside(others, f"{path}.items")
    if isinstance(item, NothingAdmitted) and least > len(first):
        raise item
    places = ' ws "," ws '.join(first)
    if not isinstance(item, str):
        return places or '""'
    if not first:
        return _listed(rules, item, least, most)
    following = rules.add("next", f'ws "," ws {item}')
    high = None if most is None else min(most - len(first), MAX_COUNT)
    return f"{places} {rules.repeated(following, max(0, least - len(first)), high)}"
