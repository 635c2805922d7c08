"""Whether a value can match two plain schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from worker_node.grammars.merging import comparable
from worker_node.grammars.merging_objects import Schema
from worker_node.grammars.shape import kind_of, type_of

Choice = tuple[int, Schema]

_KINDS = frozenset({"object", "array", "string", "number", "boolean", "null"})


def overlaps_of(choices: list[Choice], spend: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """The pairs of different indices where a value that is written for one might match the other.

    What is written for a schema without a type has one of those to which its keywords belong.

    Schemas that constants tell apart, whole or of a required property, are sorted out in time linear in their number.
    """
    if _sorted_out(choices, _constants) or any(
        _sorted_out(choices, lambda one, name=name: _constants(one.get("properties", {}).get(name)))  # type: ignore[misc]
        for name in _required_everywhere(choices)
    ):
        return
    for place, one in enumerate(choices):
        for other in choices[place + 1 :]:
            spend(1 + min(len(one[1].get("properties", ())), len(other[1].get("properties", ()))))
            if one[0] != other[0] and not _never_both(one[1], other[1]):
                yield one[0], other[0]


def told_apart_at_once(options: list[Any]) -> bool:
    """Whether the first property of each option is the same and required, and its constants tell the options apart."""
    plain = [option for option in options if isinstance(option, dict)]
    firsts = {next(iter(option.get("properties") or ()), None) for option in plain}
    if len(plain) < len(options) or len(firsts) != 1 or (first := firsts.pop()) is None:
        return False
    if any(first not in option.get("required", ()) for option in plain):
        return False
    return _sorted_out(list(enumerate(plain)), lambda one: _constants(one["properties"][first]))


def _required_everywhere(choices: list[Choice]) -> list[str]:
    shared: set[str] | None = None
    for _, one in choices:
        names = set(one.get("required", ())) if type_of(one) == ["object"] else set()
        shared = names if shared is None else shared & names
        if not shared:
            return []
    return sorted(shared or ())


def _sorted_out(choices: list[Choice], constants: Callable[[Schema], set[str] | None]) -> bool:
    """Whether each choice has constants, and no two the same."""
    owner: dict[str, int] = {}
    for index, one in choices:
        found = constants(one)
        if found is None or any(owner.setdefault(constant, index) != index for constant in found):
            return False
    return True


def _constants(schema: Any) -> set[str] | None:
    """The constants of a schema, in a form that can be compared; None if it has other values."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {comparable(schema["const"])}
    return {comparable(value) for value in schema["enum"]} if "enum" in schema else None


def _kinds(schema: Schema) -> frozenset[str]:
    """The types of values that may match; a keyword that other types ignore says nothing."""
    if "type" not in schema:
        constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
        return _KINDS if constants is None else frozenset(map(kind_of, constants))
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return _broad(names)


def _never_both(one: Schema, other: Schema) -> bool:
    """Whether no value that is written for one of them matches the other."""
    written, other_written = frozenset(type_of(one)) or _KINDS, frozenset(type_of(other)) or _KINDS
    common = (_broad(written) & _kinds(other)) | (_broad(other_written) & _kinds(one))
    return _differ(one, other, depth=2, kinds=common)


def _broad(names: Iterable[str]) -> frozenset[str]:
    return frozenset("number" if name == "integer" else name for name in names)


def _differ(one: Any, other: Any, depth: int, kinds: frozenset[str] = _KINDS) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or not depth:
        return False
    first, second = _constants(one), _constants(other)
    if first is not None and second is not None:
        return not first & second
    common = _kinds(one) & _kinds(other) if kinds is _KINDS else kinds
    return all(kind in _BY_KIND and _BY_KIND[kind](one, other, depth) for kind in common)


def _objects_differ(one: Schema, other: Schema, depth: int) -> bool:
    return (
        _ranges_differ(one, other, "minProperties", "maxProperties")
        or any(_forbids(other, name) for name in one.get("required", ()))
        or any(_forbids(one, name) for name in other.get("required", ()))
        or any(
            _differ(one["properties"][name], other["properties"][name], depth - 1)
            for name in _shared(one.get("required", ()), other.get("required", ()))
            if name in one.get("properties", {}) and name in other.get("properties", {})
        )
    )


def _shared(one: Iterable[str], other: Iterable[str]) -> Iterable[str]:
    names = set(other)
    return [name for name in one if name in names]


def _forbids(schema: Schema, name: str) -> bool:
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name] is False
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _ranges_differ(one: Schema, other: Schema, low: str, high: str) -> bool:
    return any(low in a and high in b and a[low] > b[high] for a, b in ((one, other), (other, one)))


def _numbers_differ(one: Schema, other: Schema, _depth: int) -> bool:
    return any(
        low in a and high in b and (a[low] > b[high] or (a[low] == b[high] and "exclusive" in low + high))
        for a, b in ((one, other), (other, one))
        for low in ("minimum", "exclusiveMinimum")
        for high in ("maximum", "exclusiveMaximum")
    )


def _strings_differ(one: Schema, other: Schema, _depth: int) -> bool:
    return _ranges_differ(one, other, "minLength", "maxLength") or any(
        "enum" in a and "enum" in b.get("not", {}) and all(value in b["not"]["enum"] for value in a["enum"])
        for a, b in ((one, other), (other, one))
    )


_BY_KIND: dict[str, Callable[[Schema, Schema, int], bool]] = {
    "object": _objects_differ,
    "array": lambda one, other, _depth: _ranges_differ(one, other, "minItems", "maxItems"),
    "string": _strings_differ,
    "number": _numbers_differ,
}
