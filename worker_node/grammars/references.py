"""What a `$ref` means: parts of the same document, by pointer, `$anchor` or `$id`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from worker_node.errors import BadRequest
from worker_node.grammars.refusals import CannotEnforce

_ONE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_SEVERAL = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
# Any address will do that no schema has.
_ROOT = "file:///schema"
_NAMES = frozenset({"$id", "$anchor", "$dynamicAnchor", "$dynamicRef"})


class References:
    """The places of a document. `root` is the document, its references made absolute where it has names of its own.

    Raises BadRequest, or OutOfSteps.
    """

    def __init__(self, root: Any, spend: Callable[[int], None], path: str) -> None:
        self.root = root
        self._spend = spend
        self._places: dict[str, Any] = {_ROOT: root}
        if any(schema.keys() & (_NAMES - {"$id"} if schema is root else _NAMES) for schema in _schemas(root, spend)):
            self.root = copy.deepcopy(root)
            self._places = {_ROOT: self.root}
            self._name_places(path)
        elif isinstance(root, dict) and isinstance(root.get("$id"), str):
            self._places[_joined(_ROOT, root["$id"], path)] = root

    def resolve(self, reference: str, path: str) -> Any:
        """The schema that is meant. Raises CannotEnforce for another document, BadRequest if there is none."""
        address = _joined(_ROOT, reference, path, "$ref")
        base, _, fragment = address.partition("#")
        if base not in self._places:
            raise CannotEnforce(path, "$ref", "only a part of this schema can be meant")
        if not fragment or fragment.startswith("/"):
            return self._part(self._places[base], fragment, path)
        if address not in self._places:
            raise BadRequest(f"{path}.$ref: there is no {fragment[:100]!r} in the schema", param=f"{path}.$ref")
        return self._places[address]

    def _name_places(self, path: str) -> None:
        """Find the names, and make the references absolute."""
        bases: list[tuple[dict[str, Any], str]] = []
        dynamic: dict[str, int] = {}
        inside: dict[int, str] = {}
        for schema in _schemas(self.root, self._spend):
            base = inside.get(id(schema), _ROOT)
            if isinstance(schema.get("$id"), str):
                base = _joined(base, schema["$id"], path, "$id").partition("#")[0]
                self._places.setdefault(base, schema)
            for part in _parts(schema):
                inside[id(part)] = base
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(keyword), str):
                    self._places.setdefault(f"{base}#{anchor}", schema)
                    dynamic[anchor] = dynamic.get(anchor, 0) + (keyword == "$dynamicAnchor")
            bases.append((schema, base))
        for schema, base in bases:
            if isinstance(schema.get("$ref"), str):
                schema["$ref"] = _joined(base, schema["$ref"], path, "$ref")
            reference = schema.get("$dynamicRef")
            # With one such anchor it means the same from everywhere.
            if isinstance(reference, str) and "$ref" not in schema and dynamic.get(reference.partition("#")[2], 0) <= 1:
                schema["$ref"] = _joined(base, reference, path, "$dynamicRef")
                del schema["$dynamicRef"]

    def _part(self, found: Any, fragment: str, path: str) -> Any:
        self._spend(fragment.count("/"))
        for part in fragment.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise BadRequest(f"{path}.$ref: there is no {fragment[:100]!r} in the schema", param=f"{path}.$ref")
        return found


def _joined(base: str, reference: str, path: str, keyword: str = "$id") -> str:
    """The reference as an address that does not depend on where it stands."""
    if reference.startswith("#"):
        return base.partition("#")[0] + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        raise BadRequest(f"{path}.{keyword}: {reference[:100]!r} is no address", param=f"{path}.{keyword}") from None


def _schemas(root: Any, spend: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    """Every schema of the document, each before its parts."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            yield schema
            spend(1)
            waiting += _parts(schema)


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in _ONE:
            yield value
        elif keyword in _SEVERAL and isinstance(value, list):
            yield from value
        elif keyword in _NAMED and isinstance(value, dict):
            yield from value.values()
