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
from worker_node.grammars.budget import (
    MAX_COST,
    MAX_DEPTH,
    MAX_GRAMMAR_CHARACTERS,
    MAX_WIDTH,
    Budget,
)
from worker_node.grammars.containers import array_of, object_of
from worker_node.grammars.cost import grammar_cost
from worker_node.grammars.ebnf import Rules, json_literal
from worker_node.grammars.merging import ANNOTATIONS, CannotMerge, Merged, Schema, comparable
from worker_node.grammars.scalars import integer, number, string
from worker_node.grammars.shape import TYPES, check_shape, disjoint, told_apart_at_once, type_of

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


def compile_schema(schema: Any, where: str, budget: Budget | None = None) -> str:
    """Return the grammar of the JSON values to which `schema` restricts; `where` is its place in the request.

    Raises BadRequest if it is no schema, UnsupportedParameter if it cannot be enforced or is over a bound
    (`grammars.budget`); both name the part. The work is at most that of `budget`.
    """
    rules = Rules()
    grammar = rules.text(add_schema(rules, schema, where, budget or Budget(where)))
    check_cost(grammar, where)
    return grammar


def add_schema(rules: Rules, schema: Any, where: str, budget: Budget, document: Any = None) -> str:
    """Add what a schema takes to the rules of a grammar; returns the rule, or expression, of its values.

    `document` is what `$ref` refers to, the schema itself where it is None. Raises as `compile_schema`, but for the
    cost of the whole.
    """
    compiler = _Compiler(schema if document is None else document, where, budget, rules)
    try:
        return compiler.rule(schema, where)
    except RecursionError:
        raise BadRequest(f"{where}: a value in the schema is nested too deeply", param=where) from None


def check_cost(grammar: str, where: str) -> None:
    """Raise UnsupportedParameter, naming `where`, for a grammar that is over a bound."""
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise _too_large(where, len(grammar))
    cost = grammar_cost(grammar)
    if cost.compiling > MAX_COST:
        raise UnsupportedParameter(
            f"{where}: enforcing the schema costs {cost.compiling} units, the bound here is {MAX_COST}; use fewer "
            "different counts (minLength, maxLength, {n} in a pattern), or smaller ones, or fewer alternatives",
            param=where,
        )
    if cost.width > MAX_WIDTH:
        raise UnsupportedParameter(
            f"{where}: {cost.width} counted texts can be open at the same place, the bound here is {MAX_WIDTH}; use "
            "fewer alternatives with minLength, maxLength or {n} in a pattern, or tell them apart by the first key",
            param=where,
        )


def _too_large(path: str, characters: int) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{path}: the schema is too large to be enforced: its grammar has {characters} characters or more, the bound "
        f"here is {MAX_GRAMMAR_CHARACTERS}",
        param=path,
    )


class _Compiler:
    def __init__(self, root: Any, where: str, budget: Budget, rules: Rules) -> None:
        self.rules = rules
        self._budget = budget
        self._root = root
        self._root_path = where
        self._named: dict[tuple[str, str], str] = {}
        self._open: list[tuple[str, str]] = []
        self._depth = 0
        self._makers: dict[str, Callable[[Schema, str], str]] = {
            "object": partial(object_of, self),
            "array": partial(array_of, self),
            "string": partial(string, self.rules),
            "integer": partial(integer, self.rules),
            "number": partial(number, self.rules),
            "boolean": lambda _schema, _path: '("true" | "false")',
            "null": lambda _schema, _path: '"null"',
        }

    def rule(self, schema: Any, path: str) -> str:
        """The name of a rule, or an expression, for a schema."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnsupportedParameter(
                f"{path}: the schema is too deep to be enforced: the bound here is {MAX_DEPTH} levels", param=path
            )
        if self.rules.size > MAX_GRAMMAR_CHARACTERS:
            raise _too_large(path, self.rules.size)
        self._budget.spend()
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
        self._budget.spend(sum(1 + len(value) for value in schema.values() if isinstance(value, list | dict)))
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
        # The conditions beside a reference are part of what is defined: it may be used within itself with the same.
        key = (target, comparable(beside)) if beside else (target, "")
        if key in self._open:
            raise BadRequest(f"{path}.$ref: {target[:100]!r} is defined by itself", param=f"{path}.$ref")
        if key not in self._named:
            found = self._flat(schema, path) if beside else self._resolve(target, path)
            self._named[key] = self.rules.reserve("ref")
            self._open.append(key)
            self.rules.define(self._named[key], self.rule(found, path))
            self._open.pop()
        return self._named[key]

    def inside(self, schema: Any, path: str) -> str:
        """A rule for a part of an object or a list: there a definition may be used in itself."""
        outside, self._open = self._open, []
        rule = self.rule(schema, path)
        self._open = outside
        return rule

    def _resolve(self, target: str, path: str) -> Any:
        if target != "#" and not target.startswith("#/"):
            raise UnsupportedParameter(f"{path}.$ref: only a part of this schema can be meant", param=f"{path}.$ref")
        self._budget.spend(target.count("/"))
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
        if not beside and (keyword == "anyOf" or len(schema[keyword]) == 1):
            # Nothing to merge: a reference stays one, and may be used within itself.
            parts = [self.rule(option, f"{path}.{keyword}[{i}]") for i, option in enumerate(schema[keyword])]
            return self._either(parts, schema[keyword])
        options = [self._flat(option, f"{path}.{keyword}[{i}]") for i, option in enumerate(schema[keyword])]
        if keyword == "allOf":
            return self.rule(self._merged([beside, *options], f"{path}.allOf"), path)
        merged = [self._merged([option, beside], f"{path}.{keyword}[{i}]") for i, option in enumerate(options)]
        if keyword == "oneOf" and not disjoint(merged):
            raise UnsupportedParameter(
                f"{path}.oneOf: a value could match two of these; use anyOf, or a property that tells them apart",
                param=f"{path}.oneOf",
            )
        parts = [
            self.rule(option if beside else schema[keyword][i], f"{path}.{keyword}[{i}]")
            for i, option in enumerate(merged)
        ]
        return self._either(parts, merged)

    def _either(self, parts: list[str], options: list[Any]) -> str:
        flat = [self._flat(option, "") for option in options if option is not False]
        hint = "choice" if told_apart_at_once(flat) else "alt"
        return self.rules.add(hint, " | ".join(dict.fromkeys(parts)))

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
            if beside and not isinstance(found, dict | bool):
                raise BadRequest(f"{path}.$ref: what it means is no schema", param=f"{path}.$ref")
            if beside and found is not False:
                found = self._merged([{} if found is True else found, beside], path)
            schema = found
        raise BadRequest(f"{path}: a chain of $ref without an end", param=path)

    def _merged(self, schemas: list[Schema], path: str) -> Schema:
        """One schema for values that match all of these."""
        merged = Merged(self._budget)
        try:
            for schema in schemas:
                check_shape(schema, path)
                merged.add(schema)
        except CannotMerge as error:
            raise UnsupportedParameter(
                f"{path}: two conditions on the same value cannot be held to at once ({error})", param=path
            ) from None
        return merged.schema()

    def _constants(self, schema: Schema, path: str) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if "const" in schema and "enum" in schema:
            allowed = set(map(comparable, schema["enum"]))
            values = [value for value in values if comparable(value) in allowed]
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
        try:
            literals = [json_literal(value) for value in fitting]
        except ValueError:
            raise BadRequest(f"{path}: a constant that cannot be written in JSON", param=path) from None
        return self.rules.add("const", " | ".join(literals))
