"""A schema with `$ref`, `allOf`, `anyOf` and `oneOf` as plain schemas, one of which a value has to match.

Conditions on the same value are merged into one schema. The choices of `oneOf` must differ by their types, by constants
or by the constants of a property, which is then required. Others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from worker_node.core.errors import UnsupportedParameter
from worker_node.structured_output.cost import MAX_DEPTH, Budget
from worker_node.structured_output.keywords import (
    COMBINING,
    KEYWORDS_OF,
    CannotEnforce,
    References,
    Schema,
    comparable,
    read_schema,
)
from worker_node.structured_output.scalars import FORMATS, REFUSED_FORMATS

# What reading and merging a schema take however small it is, and telling two apart.
_STEPS = 8
_PAIR_STEPS = 8

Alternatives = list[Schema]


class _Contradiction(ValueError):
    """No value matches both schemas."""


class Combiner:
    """Expands the schemas of one document. `dropped` takes the refusal of a keyword, or raises it."""

    def __init__(self, budget: Budget, references: References, dropped: Callable[[CannotEnforce], None]) -> None:
        self._budget = budget
        self._references = references
        self._dropped = dropped
        self._depth = 0

    def alternatives(self, schema: Any, path: str) -> Alternatives:
        """The plain schemas, none if no value matches. Raises BadRequest, UnsupportedParameter naming the part."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        self._depth += 1
        self._budget.spend(_STEPS)
        if self._depth > MAX_DEPTH:
            raise UnsupportedParameter.at(
                path, f"it is defined by itself or combined too deeply, the bound here is {MAX_DEPTH} levels"
            )
        try:
            return self._alternatives(read_schema(schema, path, self._dropped), path)
        finally:
            self._depth -= 1

    def _alternatives(self, schema: Schema, path: str) -> Alternatives:
        if not COMBINING & schema.keys():
            return [schema]
        singles: Alternatives = [{key: value for key, value in schema.items() if key not in COMBINING}]
        choices: list[Alternatives] = []
        for options in self._parts(schema, path):
            if not options:
                return []
            if len(options) == 1:
                singles.append(options[0])
            else:
                choices.append(options)
        merged = self.merged(singles, path)
        found = [] if merged is None else [merged]
        for options in choices:
            found = [
                one for base in found for option in options if (one := self.merged([option, base], path)) is not None
            ]
        if "unevaluatedProperties" in schema:
            # All that any part of the schema looks at is in the plain schema now.
            found = [{"additionalProperties": schema["unevaluatedProperties"]} | one for one in found]
        return found

    def _parts(self, schema: Schema, path: str) -> Iterator[Alternatives]:
        """The alternatives of each part that has to hold."""
        if "const" in schema:
            yield [{"enum": [schema["const"]]}]
        if "$ref" in schema:
            yield self.alternatives(self._references.resolve(schema["$ref"], path), path)
        for i, part in enumerate(schema.get("allOf", ())):
            yield self.alternatives(part, f"{path}.allOf[{i}]")
        if "anyOf" in schema:
            options = enumerate(schema["anyOf"])
            yield [found for i, part in options for found in self.alternatives(part, f"{path}.anyOf[{i}]")]
        if "oneOf" in schema:
            yield self._exclusive(schema["oneOf"], path)
        excluded = schema.get("not", False)
        if excluded in (True, {}):
            yield []
        elif excluded is not False:
            self._dropped(CannotEnforce(path, "not"))

    def _exclusive(self, parts: list[Any], path: str) -> Alternatives:
        found: Alternatives = []
        for option, held in self._held_apart(parts, path):
            if held is None:
                self._dropped(
                    CannotEnforce(
                        path,
                        "oneOf",
                        "a value could match two of these; use anyOf, or a property whose constants distinguish them",
                    )
                )
            found.append(option if held is None else held)
        return found

    def are_apart(self, parts: list[Any], path: str) -> bool:
        """Whether no value that is written for one of these matches another, just as they are."""
        return all(held is option for option, held in self._held_apart(parts, path))

    def _held_apart(self, parts: list[Any], path: str) -> Iterator[tuple[Schema, Schema | None]]:
        """Each alternative, and the same with the property required that tells it apart; None if none does."""
        choices = [self.alternatives(part, f"{path}.oneOf[{i}]") for i, part in enumerate(parts)]
        for index, options in enumerate(choices):
            others = [other for place, one in enumerate(choices) if place != index for other in one]
            for option in options:
                self._budget.spend(len(others) * (_PAIR_STEPS + len(option.get("properties", ()))))
                yield option, _apart(option, others, path)

    def merged(self, schemas: list[Schema], path: str) -> Schema | None:
        schemas = [schema for schema in schemas if schema]
        if len(schemas) < 2:
            return schemas[0] if schemas else {}
        values = [value for schema in schemas for value in schema.values()]
        parts = sum(len(value) for value in values if isinstance(value, list | dict | tuple))
        self._budget.spend(_STEPS + len(values) + parts)
        try:
            return _merged(schemas, self._budget)
        except _CannotMerge as error:
            raise UnsupportedParameter.at(
                path, f"two conditions on the same value cannot be enforced at once ({error})"
            ) from None
        except _Contradiction:
            return None


def types_of(schema: Schema) -> list[str]:
    """The types that a schema names, or to which its keywords belong; none if it says nothing of a type."""
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else list(dict.fromkeys(schema["type"]))
        return [name for name in names if not (name == "integer" and "number" in names)]
    # Formats like int32 say nothing of the type.
    keywords = schema.keys() - (set() if schema.get("format") in FORMATS.keys() | REFUSED_FORMATS else {"format"})
    numeric = keywords & (KEYWORDS_OF["number"] - {"format"})
    return [kind for kind in ("object", "array", "string") if keywords & KEYWORDS_OF[kind]] + ["number"] * bool(numeric)


# Telling choices apart. A choice without a type is never apart from another: any value may match it.


def _apart(one: Schema, others: Alternatives, path: str) -> Schema | None:
    """The schema, with the properties required that tell it from the others; None if it could match one of them."""
    for other in others:
        if _differ(one, other, path):
            continue
        ours, theirs = one.get("properties", {}), other.get("properties", {})
        tag = next((name for name in ours if name in theirs and _differ_at(name, ours, theirs, path)), None)
        if tag is None or _kinds(one) != {"object"}:
            return None
        one = one | {"required": [*one.get("required", ()), tag]}
    return one


def _differ(one: Schema | bool, other: Schema | bool, path: str) -> bool:
    """Whether no value matches both: by type, by constants, or by a property that the first requires."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is False or other is False
    first, second = _values(one), _values(other)
    if first is not None and second is not None:
        return set(map(comparable, first)).isdisjoint(map(comparable, second))
    common = _kinds(one) & _kinds(other)
    ours, theirs = one.get("properties", {}), other.get("properties", {})
    return not common or (
        common == {"object"}
        and any(
            name in ours and name in theirs and _differ_at(name, ours, theirs, path) for name in one.get("required", ())
        )
    )


def _differ_at(name: str, ours: Schema, theirs: Schema, path: str) -> bool:
    first, second = (
        schema if isinstance(schema, bool) else read_schema(schema, path, lambda _: None)
        for schema in (ours[name], theirs[name])
    )
    return _differ(first, second, path)


def _values(schema: Any) -> list[Any] | None:
    """The constants of a schema; None if it has other values."""
    if isinstance(schema, bool):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


_JSON_TYPES: dict[Any, str] = {str: "string", list: "array", dict: "object", bool: "boolean", type(None): "null"}
_KINDS = {"number", *_JSON_TYPES.values()}


def _kinds(schema: Schema) -> set[str]:
    """The types of values that may match; a keyword that other types ignore says nothing."""
    if (constants := _values(schema)) is not None:
        return {_JSON_TYPES.get(type(value), "number") for value in constants}
    return {"number" if name == "integer" else name for name in types_of(schema)} if "type" in schema else _KINDS


# Merging conditions on the same value.


class _CannotMerge(ValueError):
    """Two schemas have the keyword, and one keyword cannot say both."""


def _merged(schemas: list[Schema], budget: Budget) -> Schema:
    found = _merged_properties(schemas, budget)
    if sum(not _ITEMS.isdisjoint(schema) for schema in schemas) > 1:
        raise _CannotMerge("items")
    for keyword in dict.fromkeys(keyword for schema in schemas for keyword in schema):
        if keyword not in found:
            values = [schema[keyword] for schema in schemas if keyword in schema]
            found[keyword] = values[0] if len(values) == 1 else _MERGE.get(keyword, _same(keyword, budget))(values)
    return found


# Their meaning depends on others of the same schema.
_ITEMS = frozenset({"prefixItems", "items"})
_PROPERTIES = frozenset({"properties", "patternProperties", "additionalProperties"})


def _merged_properties(schemas: list[Schema], budget: Budget) -> Schema:
    """Each `additionalProperties` is about the members that its own schema does not name."""
    schemas = [schema for schema in schemas if not _PROPERTIES.isdisjoint(schema)]
    if len(schemas) < 2:
        return {}
    if any("patternProperties" in schema for schema in schemas):
        raise _CannotMerge("patternProperties")
    parts: dict[str, list[Any]] = {name: [] for schema in schemas for name in schema.get("properties", ())}
    for schema in schemas:
        own, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, part in own.items():
            parts[name].append(part)
        if others not in (True, {}):
            budget.spend(len(parts))
            for name in parts.keys() - own.keys():
                parts[name].append(others)
    found: Schema = {"properties": {name: _both(conditions) for name, conditions in parts.items()}} if parts else {}
    if any("additionalProperties" in schema for schema in schemas):
        found["additionalProperties"] = _both(schema.get("additionalProperties", True) for schema in schemas)
    return found


def _both(parts: Iterable[Any]) -> Any:
    kept = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


def _types(values: list[Any]) -> list[str]:
    sets = [{value} if isinstance(value, str) else set(value) for value in values]
    names = [
        name for name in KEYWORDS_OF if all(name in one or (name == "integer" and "number" in one) for one in sets)
    ]
    if not names:
        raise _Contradiction("type")
    return names


def _enum(values: list[list[Any]]) -> list[Any]:
    allowed = set.intersection(*(set(map(comparable, value)) for value in values))
    common = [value for value in values[0] if comparable(value) in allowed]
    if not common:
        raise _Contradiction("enum")
    return common


def _patterns(values: list[Any]) -> tuple[str, ...]:
    # A tuple, which no request holds: a string that has to match all of them.
    return tuple(dict.fromkeys(one for value in values for one in ((value,) if isinstance(value, str) else value)))


def _same(keyword: str, budget: Budget) -> Callable[[list[Any]], Any]:
    def merge(values: list[Any]) -> Any:
        texts = [comparable(value) for value in values]
        budget.spend(sum(map(len, texts)) // 8)
        if len(set(texts)) > 1:
            raise _CannotMerge(keyword)
        return values[0]

    return merge


_MERGE: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
    "type": _types,
    "enum": _enum,
    "pattern": _patterns,
    "uniqueItems": any,
    "required": lambda values: list(dict.fromkeys(name for value in values for name in value)),
}
