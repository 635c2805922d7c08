"""The schema of the values that do not match a schema.

One level at a time: parts are negated with `not`, which is expanded when it is met. Where no schema says it exactly,
the result admits less, never more.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from worker_node.grammars.merging import ANNOTATIONS, comparable
from worker_node.grammars.merging_objects import Schema
from worker_node.grammars.refusals import CannotEnforce
from worker_node.grammars.shape import kind_of

_TYPES = ("object", "array", "string", "number", "boolean", "null")
# Nothing says "some key beyond these": the values that only break one of these are left out.
_LEFT_OUT = frozenset({"additionalProperties", "patternProperties", "propertyNames", "additionalItems"})
_ONLY_WITH = {
    "minContains": "contains",
    "maxContains": "contains",
    "then": "if",
    "else": "if",
}


def negated(schema: Any, path: str, resolve: Callable[[str], Any]) -> Any:
    """The schema of what does not match; `resolve` follows a `$ref`. Raises CannotEnforce."""
    if isinstance(schema, bool):
        return not schema
    options: list[Any] = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS or keyword.startswith("x-") or keyword in _LEFT_OUT or keyword in _ONLY_WITH:
            continue
        if keyword == "$ref":
            options.append({"not": resolve(value)})
        elif keyword in _NEGATIONS:
            options += _NEGATIONS[keyword](value, schema)
        else:
            raise CannotEnforce(path, "not", f"cannot be enforced with {keyword[:100]} in it")
    return {"anyOf": options} if options else False


def is_plain_exclusion(schema: Schema) -> bool:
    """Whether its `not` only excludes some strings: the grammar of a string does that itself."""
    excluded = schema["not"]
    return (
        schema.get("type") == "string"
        and isinstance(excluded, dict)
        and set(excluded) == {"enum"}
        and isinstance(excluded["enum"], list)
        and all(isinstance(value, str) for value in excluded["enum"])
    )


def _of(kind: str, **keywords: Any) -> Schema:
    return {"type": kind, **keywords}


def _type(value: Any, _schema: Schema) -> list[Any]:
    names = {value} if isinstance(value, str) else set(value)
    if "integer" in names:
        names.add("number")
    kinds = [kind for kind in _TYPES if kind not in names]
    return [{"type": kinds}] if kinds else []


def _enum(values: list[Any], _schema: Schema) -> list[Any]:
    # What has none of the types of the constants, and for each of these types what is none of them.
    strings = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    booleans = {value for value in values if isinstance(value, bool)}
    kinds = [kind for kind in _TYPES if kind not in {kind_of(value) for value in values}]
    options: list[Any] = [{"type": kinds}] if kinds else []
    if strings:
        options.append(_of("string") | {"not": {"enum": strings}})
    if numbers:
        options += [_of("number", exclusiveMaximum=numbers[0]), _of("number", exclusiveMinimum=numbers[-1])]
        options += [_of("number", exclusiveMinimum=low, exclusiveMaximum=high) for low, high in pairwise(numbers)]
    if len(booleans) == 1:
        options.append({"enum": [not booleans.pop()]})
    for kind, other in (("array", _other_list), ("object", _other_object)):
        found = {comparable(value): value for value in values if kind_of(value) == kind}
        if found:
            options.append({"allOf": [{"anyOf": other(value)} for value in found.values()]})
    return options


def _other_list(values: list[Any]) -> list[Any]:
    shorter = [_of("array", maxItems=len(values) - 1)] if values else []
    others = [
        _of("array", prefixItems=[True] * i + [{"not": {"const": value}}], items=True, minItems=len(values))
        for i, value in enumerate(values)
    ]
    return [*shorter, _of("array", minItems=len(values) + 1), *others]


def _other_object(values: Schema) -> list[Any]:
    if not values:
        return [_of("object", minProperties=1)]
    return [
        option
        for name, value in values.items()
        for option in (_without(name), _of("object", properties={name: {"not": {"const": value}}}, required=[name]))
    ]


def _without(name: str) -> Schema:
    return _of("object", properties={name: False})


def _properties(value: Schema, _schema: Schema) -> list[Any]:
    return [
        _of("object", properties={name: {"not": part}}, required=[name])
        for name, part in value.items()
        if part is not True
    ]


def _prefix(values: list[Any], _schema: Schema) -> list[Any]:
    return [
        _of("array", prefixItems=[True] * i + [{"not": part}], items=True, minItems=i + 1)
        for i, part in enumerate(values)
    ]


def _items(value: Any, schema: Schema) -> list[Any]:
    first = len(schema.get("prefixItems", ()))
    if first:
        return []
    return [_of("array", contains={"not": value})]


def _contains(value: Any, schema: Schema) -> list[Any]:
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if least == 1:
        fewer: list[Any] = [_of("array", items={"not": value})]
    else:
        fewer = [_of("array", contains=value, minContains=0, maxContains=least - 1)] if least else []
    more = [] if most is None else [_of("array", contains=value, minContains=most + 1)]
    return fewer + more


def _dependent_required(value: Schema, _schema: Schema) -> list[Any]:
    return [
        _of("object", properties={other: False}, required=[name])
        for name, others in value.items()
        for other in others
        if other != name
    ]


def _dependent_schemas(value: Schema, _schema: Schema) -> list[Any]:
    return [{"allOf": [_of("object", required=[name]), {"not": part}]} for name, part in value.items()]


def _condition(value: Any, schema: Schema) -> list[Any]:
    held = [{"allOf": [value, {"not": schema["then"]}]}] if "then" in schema else []
    return held + ([{"allOf": [{"not": value}, {"not": schema["else"]}]}] if "else" in schema else [])


_NEGATIONS: dict[str, Callable[[Any, Schema], list[Any]]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda value, schema: _enum([value], schema),
    "properties": _properties,
    "required": lambda names, _: [_without(name) for name in names],
    "minProperties": lambda n, _: [_of("object", maxProperties=n - 1)] if n else [],
    "maxProperties": lambda n, _: [_of("object", minProperties=n + 1)],
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "prefixItems": _prefix,
    "items": _items,
    "minItems": lambda n, _: [_of("array", maxItems=n - 1)] if n else [],
    "maxItems": lambda n, _: [_of("array", minItems=n + 1)],
    "contains": _contains,
    "minLength": lambda n, _: [_of("string", maxLength=n - 1)] if n else [],
    "maxLength": lambda n, _: [_of("string", minLength=n + 1)],
    "minimum": lambda n, _: [_of("number", exclusiveMaximum=n)],
    "maximum": lambda n, _: [_of("number", exclusiveMinimum=n)],
    "exclusiveMinimum": lambda n, _: [_of("number", maximum=n)],
    "exclusiveMaximum": lambda n, _: [_of("number", minimum=n)],
    "not": lambda value, _: [value],
    "allOf": lambda parts, _: [{"not": part} for part in parts],
    "anyOf": lambda parts, _: [{"allOf": [{"not": part} for part in parts]}],
    # What matches two of them is left out.
    "oneOf": lambda parts, _: [{"allOf": [{"not": part} for part in parts]}],
    "if": _condition,
}
