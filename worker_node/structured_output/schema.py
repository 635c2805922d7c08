"""A JSON schema to EBNF: everything that the grammar admits is valid against the schema.

The other way round need not hold: an object has its declared properties and no others, keys come in the order of
declaration, a decimal between bounds has a fixed number of digits. What cannot be enforced is refused by name, or
dropped and listed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.structured_output.combining import Combiner, types_of
from worker_node.structured_output.containers import array_of, object_of
from worker_node.structured_output.cost import MAX_DEPTH, MAX_GRAMMAR_CHARACTERS, Budget, check_cost, too_large
from worker_node.structured_output.ebnf import Rules, one_constant
from worker_node.structured_output.keywords import (
    KEYWORDS_OF,
    TYPES,
    CannotEnforce,
    NothingAdmitted,
    References,
    Schema,
    comparable,
    read_schema,
)
from worker_node.structured_output.scalars import number, string


def compile_schema(schema: Any, where: str, budget: Budget | None = None) -> str:
    """Return the grammar of the JSON values to which `schema` restricts; `where` is its place in the request.

    Raises BadRequest if it is not a schema, UnsupportedParameter if it cannot be enforced or is over a bound (`cost`);
    both name the part. The work is at most that of `budget`.
    """
    rules = Rules()
    grammar = rules.text(add_schema(rules, schema, where, budget or Budget(where)))
    check_cost(grammar, where)
    return grammar


def add_schema(
    rules: Rules,
    schema: Any,
    where: str,
    budget: Budget,
    document: Any = None,
    dropped: dict[str, None] | None = None,
) -> str:
    """Add what a schema takes to the rules of a grammar; returns the rule, or expression, of its values.

    `document` is what `$ref` refers to, the schema itself where it is None. With `dropped`, keywords that cannot be
    enforced are dropped, and their places added to it. Raises as `compile_schema`, but for the cost of the whole.
    """
    try:
        return Compiler(schema if document is None else document, budget, rules, dropped).rule(schema, where)
    except RecursionError:
        raise BadRequest(f"{where}: a value in the schema is nested too deeply", param=where) from None


class Compiler:
    """Makes the rules for the parts of one document."""

    def __init__(self, document: Any, budget: Budget, rules: Rules, dropped: dict[str, None] | None) -> None:
        self.rules = rules
        self.spend = budget.spend
        self._dropped = dropped
        self._references = References(document)
        self._combiner = Combiner(budget, self._references, self._drop)
        self.alternatives = self._combiner.alternatives
        self._named: dict[tuple[str, str], str] = {}
        self._dead: dict[tuple[str, str], NothingAdmitted] = {}
        self._open: list[tuple[str, str]] = []
        self._depth = 0
        self._makers: dict[str, Callable[[Schema, str], str]] = {
            "object": partial(object_of, self),
            "array": partial(array_of, self),
            "string": partial(string, rules, budget.spend),
            "integer": partial(number, rules, whole=True),
            "number": partial(number, rules, whole=False),
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
            raise too_large(path, self.rules.size)
        self.spend()
        try:
            return self._rule(schema, path)
        finally:
            self._depth -= 1

    def inside(self, schema: Any, path: str) -> str | NothingAdmitted:
        """A rule for a part of an object or a list, where a definition may be used in itself.

        The reason, for the caller to raise or to pass over, if there is no value to write.
        """
        outside, self._open = self._open, []
        try:
            return self.rule(schema, path)
        except NothingAdmitted as reason:
            return reason
        finally:
            self._open = outside

    def _rule(self, schema: Any, path: str) -> str:
        if schema is True:
            return "value"
        if schema is False:
            raise NothingAdmitted(path, "false matches no value")
        schema = read_schema(schema, path, self._drop)
        self.spend(sum(1 + len(value) for value in schema.values() if isinstance(value, list | dict)))
        if "$ref" in schema:
            return self._reference(schema, path)
        for keyword in ("anyOf", "allOf", "oneOf"):
            if schema.keys() == {keyword} and (
                keyword == "anyOf"
                or len(schema[keyword]) == 1
                or (keyword == "oneOf" and self._combiner.are_apart(schema[keyword], path))
            ):
                # Nothing to merge: a reference stays one, and may be used within itself.
                return self._either(schema[keyword], f"{path}.{keyword}", self.rule)
        return self._either(self.alternatives(schema, path), path, self._plain)

    def _either(self, options: list[Any], path: str, make: Callable[[Any, str], str]) -> str:
        parts: dict[str, None] = {}
        refusal: NothingAdmitted | None = None
        for i, option in enumerate(options):
            try:
                parts[make(option, path if make == self._plain else f"{path}[{i}]")] = None
            except NothingAdmitted as error:
                refusal = refusal or error
        if not parts:
            raise refusal or NothingAdmitted(path)
        if len(parts) == 1:
            return next(iter(parts))
        return self.rules.add("alt", " | ".join(map(self.rules.apart, parts)))

    def _plain(self, schema: Schema, path: str) -> str:
        if "enum" in schema:
            return self._constants(schema, path)
        kinds = types_of(schema)
        if not kinds:
            return "value"
        return self._either(kinds, path, lambda kind, _: self._of_type(schema, kind, path))

    def _of_type(self, schema: Schema, kind: str, path: str) -> str:
        own = {keyword: value for keyword, value in schema.items() if keyword in KEYWORDS_OF[kind]}
        while True:
            try:
                return self._makers[kind](own, path)
            except CannotEnforce as error:
                self._drop(error)
                if error.keyword not in own:
                    raise
                del own[error.keyword]

    def _drop(self, error: CannotEnforce) -> None:
        """List the keyword as dropped, or raise."""
        if self._dropped is None:
            raise error
        self._dropped[str(error.param)] = None

    def _reference(self, schema: Schema, path: str) -> str:
        target = schema["$ref"]
        # The conditions beside a reference are part of what is defined: it may be used within itself with the same.
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        key = (target, comparable(beside) if beside else "")
        if key in self._open:
            raise BadRequest(f"{path}.$ref: {target[:100]!r} is defined by itself", param=f"{path}.$ref")
        if key in self._dead:
            raise self._dead[key]
        if key not in self._named:
            self._named[key] = self.rules.reserve("ref")
            self._open.append(key)
            try:
                if beside:
                    body = self._either(self.alternatives(schema, path), path, self._plain)
                else:
                    body = self.rule(self._references.resolve(target, path), path)
            except NothingAdmitted as error:
                self._dead[key] = error
                # What was made since may refer to this one.
                while self._named.popitem()[0] != key:
                    pass
                raise
            finally:
                self._open.pop()
            self.rules.define(self._named[key], body)
        return self._named[key]

    def _constants(self, schema: Schema, path: str) -> str:
        try:
            constants = one_constant(self.constants(schema, path))
        except ValueError:
            raise BadRequest(f"{path}: a constant that cannot be written in JSON", param=path) from None
        if not constants:
            raise NothingAdmitted(path)
        return self.rules.add("const", constants)

    def constants(self, plain: Schema, path: str) -> list[Any]:
        """The values of a plain schema with constants."""
        kinds = types_of({"type": plain["type"]}) if "type" in plain else list(TYPES)
        for keyword in sorted(plain.keys() - {"enum", "type"}):
            self._drop(CannotEnforce(path, keyword, "cannot be enforced beside enum or const"))
        return [value for value in plain["enum"] if any(TYPES[kind](value) for kind in kinds)]
