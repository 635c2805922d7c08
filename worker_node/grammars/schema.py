"""JSON Schema to EBNF: everything that the grammar admits is valid against the schema.

The other way round need not hold: an object has its declared properties and no others, keys come in the order of
declaration, a decimal between bounds has a fixed number of digits. A keyword that cannot be held to is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.grammars.alternatives import COMBINING, Expansion
from worker_node.grammars.apart import told_apart_at_once
from worker_node.grammars.arrays import array_of
from worker_node.grammars.budget import (
    MAX_COST,
    MAX_DEPTH,
    MAX_GRAMMAR_CHARACTERS,
    MAX_WIDTH,
    Budget,
)
from worker_node.grammars.cost import grammar_cost
from worker_node.grammars.ebnf import Rules, json_literal
from worker_node.grammars.merging import ANNOTATIONS, comparable
from worker_node.grammars.merging_objects import Schema
from worker_node.grammars.numbers import number
from worker_node.grammars.objects import object_of
from worker_node.grammars.pattern import PatternRefused
from worker_node.grammars.references import References
from worker_node.grammars.refusals import CannotEnforce, NothingAdmitted
from worker_node.grammars.scalars import string
from worker_node.grammars.shape import COUNTS, KEYWORDS_OF, TYPES, check_shape, type_of
from worker_node.grammars.texts import fits

_EVERYWHERE = ANNOTATIONS | COMBINING | {"type", "enum"}
_KNOWN = _EVERYWHERE.union(*KEYWORDS_OF.values())


def compile_schema(schema: Any, where: str, budget: Budget | None = None) -> str:
    """Return the grammar of the JSON values to which `schema` restricts; `where` is its place in the request.

    Raises BadRequest if it is no schema, UnsupportedParameter if it cannot be enforced or is over a bound
    (`grammars.budget`); both name the part. The work is at most that of `budget`.
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
        compiler = _Compiler(schema if document is None else document, where, budget, rules, dropped)
        return compiler.rule(compiler.root if document is None or schema is document else schema, where)
    except RecursionError:
        raise BadRequest(f"{where}: a value in the schema is nested too deeply", param=where) from None


def check_cost(grammar: str, where: str) -> None:
    """Raise UnsupportedParameter, naming `where`, for a grammar that is over a bound."""
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise _too_large(where, len(grammar))
    cost = grammar_cost(grammar)
    if cost.compiling > MAX_COST:
        raise UnsupportedParameter(
            f"{where}: enforcing it costs {cost.compiling} units, the bound here is {MAX_COST}; use fewer "
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
    def __init__(self, root: Any, where: str, budget: Budget, rules: Rules, dropped: dict[str, None] | None) -> None:
        self.rules = rules
        self._budget = budget
        self.spend = budget.spend
        self._dropped = dropped
        self._references = References(root, budget.spend, where)
        self.root = self._references.root
        self._expansion = Expansion(budget, self._references.resolve, self._accept, self._drop)
        self._named: dict[tuple[str, str], str] = {}
        self._dead: dict[tuple[str, str], NothingAdmitted] = {}
        self._open: list[tuple[str, str]] = []
        self._depth = 0
        self._makers: dict[str, Callable[[Schema, str], str]] = {
            "object": partial(object_of, self),
            "array": partial(array_of, self),
            "string": partial(string, self.rules, budget.spend),
            "integer": partial(number, self.rules, whole=True),
            "number": partial(number, self.rules, whole=False),
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

    def inside(self, schema: Any, path: str) -> str:
        """A rule for a part of an object or a list: there a definition may be used in itself."""
        outside, self._open = self._open, []
        try:
            return self.rule(schema, path)
        finally:
            self._open = outside

    def alternatives(self, schema: Any, path: str) -> list[Schema]:
        """The plain schemas of which a value matches one."""
        return self._expansion.of(schema, path)

    def _rule(self, schema: Any, path: str) -> str:
        if schema is True or schema == {}:
            return "value"
        if schema is False:
            raise NothingAdmitted(path, "false admits no value at all")
        check_shape(schema, path)
        self._budget.spend(sum(1 + len(value) for value in schema.values() if isinstance(value, list | dict)))
        schema = self._accept(schema, path)
        counting = {key: value for key, value in schema.items() if key not in ANNOTATIONS and not key.startswith("x-")}
        if "$ref" in schema:
            return self._reference(counting, path)
        for keyword in ("anyOf", "allOf", "oneOf"):
            if counting.keys() == {keyword} and (
                keyword == "anyOf" or len(schema[keyword]) == 1 or self._is_choice(schema, path)
            ):
                # Nothing to merge: a reference stays one, and may be used within itself.
                return self._either(schema[keyword], f"{path}.{keyword}", self.rule)
        return self._either(self.alternatives(counting, path), path, self._plain)

    def _is_choice(self, schema: Schema, path: str) -> bool:
        """Whether at most one of `oneOf` can match."""
        if "oneOf" not in schema:
            return False
        found = [self.alternatives(option, f"{path}.oneOf[{i}]") for i, option in enumerate(schema["oneOf"])]
        return not self._expansion.overlapping(found)

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
        hint = "choice" if told_apart_at_once([self._shown(option, path) for option in options]) else "alt"
        return self.rules.add(hint, " | ".join(parts))

    def _shown(self, option: Any, path: str) -> Any:
        """The option, or what it refers to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(option, dict) or not isinstance(option.get("$ref"), str):
                break
            option = self._references.resolve(option["$ref"], path)
        return option

    def _plain(self, schema: Schema, path: str) -> str:
        if not schema:
            return "value"
        if "enum" in schema:
            return self._constants(schema, path)
        kinds = type_of(schema)
        if not kinds:
            return "value"
        return self._either(kinds, path, lambda kind, _: self._of_type(schema, kind, path))

    def _of_type(self, schema: Schema, kind: str, path: str) -> str:
        own = {
            keyword: int(value) if keyword in COUNTS else value
            for keyword, value in schema.items()
            if keyword in KEYWORDS_OF[kind]
        }
        while True:
            try:
                return self._makers[kind](own, path)
            except CannotEnforce as error:
                self._drop(error)
                if error.keyword not in own:
                    raise
                del own[error.keyword]

    def _accept(self, schema: Schema, path: str) -> Schema:
        """The schema, without the keywords that are dropped."""
        unknown = [keyword for keyword in schema if keyword not in _KNOWN and not keyword.startswith("x-")]
        for keyword in unknown:
            self._drop(CannotEnforce(path, keyword, "this part of a schema cannot be enforced"))
        return {key: value for key, value in schema.items() if key not in unknown} if unknown else schema

    def _drop(self, error: CannotEnforce) -> None:
        """List the keyword as dropped, or raise."""
        if self._dropped is None:
            raise error
        self._dropped[str(error.param)] = None

    def _reference(self, schema: Schema, path: str) -> str:
        target = schema["$ref"]
        # The conditions beside a reference are part of what is defined: it may be used within itself with the same.
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        key = (target, comparable(beside)) if beside else (target, "")
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
            literals = [json_literal(value) for value in self.constants(schema, path)]
        except ValueError:
            raise BadRequest(f"{path}: a constant that cannot be written in JSON", param=path) from None
        if not literals:
            raise NothingAdmitted(path)
        return self.rules.add("const", " | ".join(literals))

    def constants(self, plain: Schema, path: str) -> list[Any]:
        """The values of a plain schema with constants that match it otherwise too."""
        kinds = type_of({"type": plain["type"]}) if "type" in plain else list(TYPES)
        fitting = [value for value in plain["enum"] if any(TYPES[kind](value) for kind in kinds)]
        beside = {key: value for key, value in plain.items() if key not in ANNOTATIONS | {"enum", "type"}}
        if not beside:
            return fitting
        try:
            return [value for value in fitting if fits(value, beside, self._budget.spend)]
        except (PatternRefused, ValueError) as error:
            raise CannotEnforce(path, min(beside), f"cannot be enforced beside enum or const ({error})") from None
