"""The keywords of a schema: which are known, what each holds, and what a `$ref` means."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from worker_node.core.errors import BadRequest, UnsupportedParameter

Schema = dict[str, Any]


class NothingAdmitted(BadRequest):
    """No value matches the schema, or this part of it; or none that a grammar can write, of which `why` tells."""

    def __init__(self, path: str, why: str = "no value matches this part of the schema") -> None:
        super().__init__(f"{path}: {why}", param=path)


class CannotEnforce(UnsupportedParameter):
    """A keyword cannot be turned into a grammar: it is refused, or dropped where the request allows it."""

    def __init__(self, path: str, keyword: str, why: str = "cannot be enforced") -> None:
        super().__init__(f"{path}.{keyword[:100]}: {why}", param=f"{path}.{keyword[:100]}")
        self.keyword = keyword


# They say something about a schema and nothing about a value.
ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType"),
        *("contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "example"),
        *("examples", "externalDocs", "id", "nullable", "readOnly", "strict", "title", "writeOnly"),
    }
)
# They hold schemas for the same value, or stand for some.
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "not", "unevaluatedProperties"})
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"})
KEYWORDS_OF: dict[str, frozenset[str]] = {
    "object": frozenset(
        {
            *("properties", "required", "patternProperties", "additionalProperties", "propertyNames"),
            *("minProperties", "maxProperties"),
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}
_KNOWN = ANNOTATIONS.union(COMBINING, {"type", "enum"}, *KEYWORDS_OF.values())


def _is_number(value: Any) -> bool:
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | dict)


def _is_list_of(item: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(item, value))


_SCHEMAS = ("additionalProperties", "unevaluatedProperties", "items", "propertyNames", "not")
_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (lambda value: TYPES["integer"](value) and value >= 0, "a count"),
    ),
    **dict.fromkeys(_NUMBER - {"format"}, (_is_number, "a number")),
    **dict.fromkeys(("$ref", "format"), (TYPES["string"], "a string")),
    # Several patterns that have to match at once are a tuple, which no request holds.
    "pattern": (lambda value: isinstance(value, str | tuple), "a string"),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), (_is_list_of(_is_schema, 1), "a list of schemas")),
    **dict.fromkeys(_SCHEMAS, (_is_schema, "a schema")),
    "uniqueItems": (TYPES["boolean"], "a boolean"),
    **dict.fromkeys(
        ("properties", "patternProperties"),
        (lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())), "an object of schemas"),
    ),
    "required": (_is_list_of(TYPES["string"]), "a list of names"),
    "enum": (_is_list_of(lambda _: True, 1), "a list of values"),
    "type": (_is_type, f"one or more of {', '.join(TYPES)}"),
}


def read_schema(schema: Any, path: str, dropped: Callable[[CannotEnforce], None]) -> Schema:
    """The schema without annotations, in the form of the newest draft; keywords that are not known are `dropped`.

    Raises BadRequest, naming the part, for a keyword that does not hold what the standard says.
    """
    if not isinstance(schema, dict):
        raise BadRequest.at(path, "a schema is an object or a boolean")
    found = {key: value for key, value in schema.items() if key not in ANNOTATIONS and not key.startswith("x-")}
    others = found.pop("additionalItems", None)
    if isinstance(found.get("items"), list):  # draft 7
        places = found.pop("items")
        found |= {"prefixItems": places} if places else {}
        found |= {} if others is None else {"items": others}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool):  # draft 4
            excluded = found.pop(exclusive)
            if excluded and bound in found:
                found[exclusive] = found.pop(bound)
    for keyword, value in found.items():
        if keyword in _SHAPES and not _SHAPES[keyword][0](value):
            raise BadRequest.at(f"{path}.{keyword}", f"should be {_SHAPES[keyword][1]}")
    for keyword in found:
        if keyword not in _KNOWN:
            dropped(CannotEnforce(path, keyword, "this part of a schema cannot be enforced"))
    return {key: value for key, value in found.items() if key in _KNOWN}


def comparable(value: Any) -> str:
    """A text that is the same for equal JSON values and no others: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{comparable(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(comparable, value)) + "]"
    return json.dumps(value)


# Without a slash or a scheme, a name means the same from everywhere in a document.
_PLAIN_NAME = re.compile(r"[\w.~-]+")


class References:
    """What a `$ref` means: a part of the same document by pointer or, as TypeBox writes it, a schema by its `$id`."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._ids: dict[str, Schema | None] = {}
        for part in _objects_in(root):
            name = part.get("$id")
            if isinstance(name, str) and part is not root:
                self._ids[name] = None if name in self._ids else part
        own = root.get("$id") if isinstance(root, dict) else None
        self._own = own.partition("#")[0] if isinstance(own, str) else ""

    def resolve(self, reference: str, path: str) -> Any:
        """The schema that is meant. Raises CannotEnforce for another document, BadRequest if there is none."""
        base, _, fragment = reference.partition("#")
        named = self._ids.get(base)
        if named is not None and not fragment and _PLAIN_NAME.fullmatch(base):
            return named
        # Within a schema with an id of its own, a pointer would begin there.
        if base not in {"", self._own} or self._ids or (fragment and not fragment.startswith("/")):
            raise CannotEnforce(path, "$ref", "only a part of this schema, as in #/$defs/name, or one $id can be meant")
        found = self._root
        for part in fragment.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise BadRequest.at(f"{path}.$ref", f"there is no {fragment[:100]!r} in the schema")
        return found


def _objects_in(root: Any) -> Iterator[dict[str, Any]]:
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
