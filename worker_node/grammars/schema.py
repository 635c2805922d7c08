"""JSON Schema to EBNF: everything that the grammar admits is valid against the schema.

The other way round need not hold: an object has its declared properties and no others, keys come in the order of
declaration, a decimal between bounds has a fixed number of digits. A keyword that cannot be held to is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.grammars.ebnf import Rules, json_literal
from worker_node.grammars.merging import ANNOTATIONS, CannotMerge, Schema, merge
from worker_node.grammars.scalars import MAX_COUNT, integer, number, string
from worker_node.grammars.shape import TYPES, check_shape, disjoint, type_of

MAX_DEPTH = 64
MAX_GRAMMAR_CHARACTERS = 200_000

_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset(
        {"properties", "required", "additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties"}
    ),
    "array": frozenset(
        {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "additionalItems", "uniqueItems"}
    ),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_EVERYWHERE = ANNOTATIONS | {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
_KNOWN = _EVERYWHERE.union(*_BY_TYPE.values())


def compile_schema(schema: Any, where: str) -> str:
    """Return the grammar of the JSON values to which `schema` restricts; `where` is its place in the request.

    Raises BadRequest if it is no schema, UnsupportedParameter if it cannot be held to; both name the part.
    """
    compiler = _Compiler(schema, where)
    grammar = compiler.rules.text(compiler.rule(schema, where))
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise UnsupportedParameter(f"{where}: the schema is too large to be held to", param=where)
    return grammar


def any_json_object() -> str:
    """The grammar of every JSON object."""
    return Rules().text("object")


class _Compiler:
    def __init__(self, root: Any, where: str) -> None:
        self.rules = Rules()
        self._root = root
        self._root_path = where
        self._named: dict[str, str] = {}
        self._open: list[str] = []
        self._depth = 0
        self._makers: dict[str, Callable[[Schema, str], str]] = {
            "object": self._object,
            "array": self._array,
            "string": partial(string, self.rules),
            "integer": partial(integer, self.rules),
            "number": partial(number, self.rules),
            "boolean": lambda _schema, _path: '("true" | "false")',
            "null": lambda _schema, _path: '"null"',
        }

    def rule(self, schema: Any, path: str) -> str:
        """The name of a rule, or an expression, for a schema."""
        self._depth += 1
        if self._depth > MAX_DEPTH or self.rules.size > MAX_GRAMMAR_CHARACTERS:
            raise UnsupportedParameter(f"{path}: the schema is too deep or too large to be held to", param=path)
        try:
            return self._rule(schema, path)
        finally:
            self._depth -= 1

    def _rule(self, schema: Any, path: str) -> str:
        if schema is True or schema == {}:
            return "value"
        if schema is False:
            raise UnsupportedParameter(f"{path}: false admits no value at all", param=path)
        check_shape(schema, path)
        self._refuse_unknown(schema, path)
        if "$ref" in schema:
            return self._reference(schema, path)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema:
                return self._combined(schema, keyword, path)
        if "const" in schema or "enum" in schema:
            return self._constants(schema, path)
        kinds = type_of(schema, _BY_TYPE)
        if not kinds:
            return "value"
        parts = [self._makers[kind](self._of_type(schema, kind), path) for kind in kinds]
        return parts[0] if len(parts) == 1 else self.rules.add("alt", " | ".join(parts))

    def _refuse_unknown(self, schema: Schema, path: str) -> None:
        for keyword in schema:
            if keyword not in _KNOWN and not keyword.startswith("x-"):
                raise UnsupportedParameter(
                    f"{path}.{keyword[:100]}: this part of a schema cannot be held to", param=f"{path}.{keyword[:100]}"
                )

    @staticmethod
    def _of_type(schema: Schema, kind: str) -> Schema:
        return {keyword: value for keyword, value in schema.items() if keyword in _BY_TYPE[kind]}

    def _reference(self, schema: Schema, path: str) -> str:
        target = schema["$ref"]
        beside = {key: value for key, value in schema.items() if key != "$ref" and key not in ANNOTATIONS}
        if beside:
            found = self._resolve(target, path)
            if not isinstance(found, dict):
                raise UnsupportedParameter(f"{path}.$ref: keywords beside it cannot be held to", param=f"{path}.$ref")
            return self._rule(self._merged(found, beside, path), path)
        if target in self._open:
            raise BadRequest(f"{path}.$ref: {target[:100]!r} is defined by itself", param=f"{path}.$ref")
        if target not in self._named:
            found = self._resolve(target, path)
            self._named[target] = self.rules.reserve("ref")
            self._open.append(target)
            self.rules.define(self._named[target], self.rule(found, path))
            self._open.pop()
        return self._named[target]

    def _inside(self, schema: Any, path: str) -> str:
        """A rule for a part of an object or a list: there a definition may be used in itself."""
        outside, self._open = self._open, []
        rule = self.rule(schema, path)
        self._open = outside
        return rule

    def _resolve(self, target: str, path: str) -> Any:
        if target != "#" and not target.startswith("#/"):
            raise UnsupportedParameter(f"{path}.$ref: only a part of this schema can be meant", param=f"{path}.$ref")
        found = self._root
        for part in target.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise BadRequest(f"{path}.$ref: there is no {target[:100]!r} in the schema", param=f"{path}.$ref")
        return found

    def _combined(self, schema: Schema, keyword: str, path: str) -> str:
        beside = {key: value for key, value in schema.items() if key != keyword and key not in ANNOTATIONS}
        options = [self._flat(option, f"{path}.{keyword}[{i}]") for i, option in enumerate(schema[keyword])]
        if keyword == "allOf":
            for option in options:
                beside = self._merged(beside, option, f"{path}.allOf")
            return self._rule(beside, path)
        if keyword == "oneOf" and not disjoint([self._merged(beside, option, path) for option in options]):
            raise UnsupportedParameter(
                f"{path}.oneOf: a value could match two of these; use anyOf, or a property that tells them apart",
                param=f"{path}.oneOf",
            )
        parts = [
            self.rule(self._merged(option, beside, f"{path}.{keyword}[{i}]") if beside else schema[keyword][i], path)
            for i, option in enumerate(options)
        ]
        return self.rules.add("alt", " | ".join(parts))

    def _flat(self, schema: Any, path: str) -> Schema:
        """The schema, or the one that it refers to."""
        for _ in range(MAX_DEPTH):
            if schema is True:
                return {}
            if not isinstance(schema, dict):
                raise BadRequest(f"{path}: not a schema that admits anything", param=path)
            if "$ref" not in schema:
                return schema
            check_shape(schema, path)
            beside = {key: value for key, value in schema.items() if key != "$ref" and key not in ANNOTATIONS}
            found = self._resolve(schema["$ref"], path)
            schema = self._merged(found, beside, path) if beside and isinstance(found, dict) else found
        raise BadRequest(f"{path}: a chain of $ref without an end", param=path)

    @staticmethod
    def _merged(one: Schema, other: Schema, path: str) -> Schema:
        try:
            return merge(one, other)
        except (CannotMerge, TypeError) as error:
            raise UnsupportedParameter(
                f"{path}: two conditions on the same value cannot be held to at once ({error})", param=path
            ) from None

    def _constants(self, schema: Schema, path: str) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if "const" in schema and "enum" in schema and schema["const"] not in schema["enum"]:
            values = []
        kinds = type_of({key: schema[key] for key in ("type",) if key in schema}, _BY_TYPE)
        beside = set(schema) - ANNOTATIONS - {"const", "enum", "type"}
        if beside:
            keyword = min(beside)
            raise UnsupportedParameter(
                f"{path}.{keyword}: cannot be held to beside enum or const", param=f"{path}.{keyword}"
            )
        fitting = [value for value in values if not kinds or any(TYPES[kind](value) for kind in kinds)]
        if not fitting:
            raise BadRequest(f"{path}: no value is admitted", param=path)
        return self.rules.add("const", " | ".join(json_literal(value) for value in fitting))

    def _object(self, schema: Schema, path: str) -> str:
        properties: Schema = schema.get("properties", {})
        required = list(schema.get("required", []))
        # Where properties are declared, if only that there are none, others are written only when they are asked for.
        extra = schema.get("additionalProperties", schema.get("unevaluatedProperties", "properties" not in schema))
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if not properties and not required:
            return self._map(extra, least, most, path)
        for name in required:
            if name not in properties:
                if schema.get("additionalProperties") is False:
                    raise BadRequest(
                        f"{path}.required: {name[:100]!r} is required and forbidden", param=f"{path}.required"
                    )
                properties = properties | {name: extra or True}
        if least > len(required) or (most is not None and most < len(properties)):
            raise UnsupportedParameter(
                f"{path}: minProperties and maxProperties cannot be held to beside properties", param=path
            )
        members = [
            (
                f'{json_literal(name)} ws ":" ws {self._inside(value, f"{path}.properties.{name[:100]}")}',
                name in required,
            )
            for name, value in properties.items()
            if value is not False or name in required
        ]
        return self.rules.add("object", f'"{{" ws {self._members(members)} ws "}}"')

    def _members(self, members: list[tuple[str, bool]]) -> str:
        """Members in order, those that are not required left out or not; commas between those that are there."""
        rest, begun = '""', '""'
        for member, needed in reversed(members):
            name = self.rules.add("member", member)
            after = self.rules.add("more", begun)
            rest_rule = self.rules.add("rest", rest)
            rest = f"{name} {after}" if needed else f"{name} {after} | {rest_rule}"
            begun = f'ws "," ws {name} {after}' if needed else f'(ws "," ws {name})? {after}'
        return self.rules.add("members", rest)

    def _map(self, values: Any, least: int, most: int | None, path: str) -> str:
        if least > 1:
            raise UnsupportedParameter(
                f"{path}.minProperties: more than one cannot be held to, a key may be repeated",
                param=f"{path}.minProperties",
            )
        if values is False or most == 0:
            if least:
                raise BadRequest(f"{path}: no value is admitted", param=path)
            return '("{" ws "}")'
        member = f'string ws ":" ws {self._inside(values, f"{path}.additionalProperties")}'
        return self.rules.add(
            "map", '"{" ws ' + self._listed(self.rules.add("member", member), least, most) + ' ws "}"'
        )

    def _array(self, schema: Schema, path: str) -> str:
        if schema.get("uniqueItems") and schema.get("maxItems", 2) > 1:
            raise UnsupportedParameter(f"{path}.uniqueItems: cannot be held to", param=f"{path}.uniqueItems")
        first = [self._inside(item, f"{path}.prefixItems[{i}]") for i, item in enumerate(schema.get("prefixItems", []))]
        others = schema.get("items", schema.get("unevaluatedItems", schema.get("additionalItems", True)))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if least > MAX_COUNT or (most is not None and most < least):
            raise UnsupportedParameter(f"{path}: minItems {least} cannot be held to", param=f"{path}.minItems")
        if not first:
            if others is False or most == 0:
                return '("[" ws "]")'
            return self.rules.add(
                "array", '"[" ws ' + self._listed(self._inside(others, f"{path}.items"), least, most) + ' ws "]"'
            )
        # All of the items that have a place of their own are written, and none after them unless they are asked for.
        if (most is not None and most < len(first)) or (least > len(first) and others is False):
            raise UnsupportedParameter(f"{path}: minItems and maxItems contradict prefixItems", param=path)
        body = ' ws "," ws '.join(first)
        if others is not False and most != len(first):
            item = self._inside(others, f"{path}.items")
            high = "" if most is None else str(min(most - len(first), MAX_COUNT))
            body += f' (ws "," ws {item}){{{max(0, least - len(first))},{high}}}'
        return self.rules.add("array", f'"[" ws {body} ws "]"')

    @staticmethod
    def _listed(item: str, least: int, most: int | None) -> str:
        """Items with commas between them."""
        high = "" if most is None else str(min(most, MAX_COUNT) - 1)
        body = f'{item} (ws "," ws {item}){{{max(0, least - 1)},{high}}}'
        return f"({body})" if least else f"({body})?"
