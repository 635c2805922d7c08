"""Objects and arrays of a schema as EBNF. Each raises UnsupportedParameter or BadRequest, naming the part."""

from __future__ import annotations

from typing import Any, Protocol

from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.grammars.ebnf import Rules, json_literal
from worker_node.grammars.merging import Schema
from worker_node.grammars.repetition import repeated
from worker_node.grammars.scalars import MAX_COUNT


class Compiler(Protocol):
    """Makes a rule for a part of an object or a list."""

    rules: Rules

    def inside(self, schema: Any, path: str) -> str: ...


def object_of(compiler: Compiler, schema: Schema, path: str) -> str:
    """An object: its declared properties in order, or any keys with values of one schema."""
    properties: Schema = dict(schema.get("properties", {}))
    required = set(schema.get("required", []))
    # Where properties are declared, if only that there are none, others are written only when they are asked for.
    extra = schema.get("additionalProperties", schema.get("unevaluatedProperties", "properties" not in schema))
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if not properties and not required:
        return _map(compiler, extra, least, most, path)
    for name in schema.get("required", []):
        if name not in properties:
            if schema.get("additionalProperties") is False:
                raise BadRequest(f"{path}.required: {name[:100]!r} is required and forbidden", param=f"{path}.required")
            properties[name] = extra or True
    if least > len(required) or (most is not None and most < len(properties)):
        raise UnsupportedParameter(
            f"{path}: minProperties and maxProperties cannot be held to beside properties", param=path
        )
    members = [
        (
            f'{json_literal(name)} ws ":" ws {compiler.inside(value, f"{path}.properties.{name[:100]}")}',
            name in required,
        )
        for name, value in properties.items()
        if value is not False or name in required
    ]
    return compiler.rules.add("object", f'"{{" ws {_members(compiler, members)} ws "}}"')


def _members(compiler: Compiler, members: list[tuple[str, bool]]) -> str:
    """Members in order, those that are not required left out or not; commas between those that are there."""
    rest, begun = '""', '""'
    for member, needed in reversed(members):
        name = compiler.rules.add("member", member)
        after = compiler.rules.add("more", begun)
        rest_rule = compiler.rules.add("rest", rest)
        rest = f"{name} {after}" if needed else f"{name} {after} | {rest_rule}"
        begun = f'ws "," ws {name} {after}' if needed else f'(ws "," ws {name})? {after}'
    return compiler.rules.add("members", rest)


def _map(compiler: Compiler, values: Any, least: int, most: int | None, path: str) -> str:
    if least > 1:
        raise UnsupportedParameter(
            f"{path}.minProperties: more than one cannot be held to, a key may be repeated",
            param=f"{path}.minProperties",
        )
    if values is False or most == 0:
        if least:
            raise BadRequest(f"{path}: no value is admitted", param=path)
        return '("{" ws "}")'
    member = f'string ws ":" ws {compiler.inside(values, f"{path}.additionalProperties")}'
    return compiler.rules.add(
        "map", '"{" ws ' + _listed(compiler, compiler.rules.add("member", member), least, most) + ' ws "}"'
    )


def array_of(compiler: Compiler, schema: Schema, path: str) -> str:
    """An array: items that have a place of their own, then items of one schema."""
    if schema.get("uniqueItems") and schema.get("maxItems", 2) > 1:
        raise UnsupportedParameter(f"{path}.uniqueItems: cannot be held to", param=f"{path}.uniqueItems")
    first = [compiler.inside(item, f"{path}.prefixItems[{i}]") for i, item in enumerate(schema.get("prefixItems", []))]
    others = schema.get("items", schema.get("unevaluatedItems", schema.get("additionalItems", True)))
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if least > MAX_COUNT or (most is not None and most < least):
        raise UnsupportedParameter(f"{path}: minItems {least} cannot be held to", param=f"{path}.minItems")
    if not first:
        if others is False or most == 0:
            return '("[" ws "]")'
        return compiler.rules.add(
            "array", '"[" ws ' + _listed(compiler, compiler.inside(others, f"{path}.items"), least, most) + ' ws "]"'
        )
    # All of the items that have a place of their own are written, and none after them unless they are asked for.
    if (most is not None and most < len(first)) or (least > len(first) and others is False):
        raise UnsupportedParameter(f"{path}: minItems and maxItems contradict prefixItems", param=path)
    body = ' ws "," ws '.join(first)
    if others is not False and most != len(first):
        item = compiler.rules.add("next", f'ws "," ws {compiler.inside(others, f"{path}.items")}')
        high = None if most is None else min(most - len(first), MAX_COUNT)
        body += " " + repeated(compiler.rules, item, max(0, least - len(first)), high)
    return compiler.rules.add("array", f'"[" ws {body} ws "]"')


def _listed(compiler: Compiler, item: str, least: int, most: int | None) -> str:
    """Items with commas between them."""
    following = compiler.rules.add("next", f'ws "," ws {item}')
    rest = repeated(compiler.rules, following, max(0, least - 1), None if most is None else min(most, MAX_COUNT) - 1)
    return f"({item} {rest})" if least else f"({item} {rest})?"
