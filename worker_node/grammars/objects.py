"""Objects of a schema as EBNF: declared properties in order, then others where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, Protocol

from worker_node.grammars.ebnf import Rules, json_literal
from worker_node.grammars.members import Member, in_order, in_order_counted, listed
from worker_node.grammars.merging_objects import Schema, both_parts
from worker_node.grammars.pattern import PatternRefused, pattern_to_terms
from worker_node.grammars.refusals import CannotEnforce, NothingAdmitted
from worker_node.grammars.regular import (
    EVERYTHING,
    Term,
    TooManyStates,
    both,
    either,
    matches,
    regular_to_ebnf,
    text,
    then,
    without,
)
from worker_node.grammars.texts import string_term

# Keys may match several patterns at once. With more patterns than this, those that match one are written only.
_COMBINED_PATTERNS = 3
# Other keys are told from the declared ones by so many characters of all of these.
_TOLD_BY = 60


class Compiler(Protocol):
    """Makes a rule for a part of an object or a list."""

    rules: Rules

    def inside(self, schema: Any, path: str) -> str:
        """The rule. Raises NothingAdmitted if no value matches."""

    def alternatives(self, schema: Any, path: str) -> list[Schema]:
        """The plain schemas of which a value matches one."""

    def constants(self, plain: Schema, path: str) -> list[Any]:
        """The values of a plain schema with constants that match it otherwise too."""

    def spend(self, steps: int = 1) -> None:
        """Count steps."""


def object_of(compiler: Compiler, schema: Schema, path: str) -> str:
    """The rule of an object. Raises UnsupportedParameter, BadRequest."""
    keys = _Keys(compiler, schema, path)
    required = list(dict.fromkeys(schema.get("required", [])))
    needed = set(required)
    declared = schema.get("properties", {})
    members = []
    for name in [*declared, *(name for name in required if name not in declared)]:
        try:
            rule = compiler.inside(keys.value_of(name), f"{path}.properties.{name[:100]}")
        except NothingAdmitted:
            if name in needed:
                raise
            continue
        members.append(Member(f'{json_literal(name)} ws ":" ws {rule}', name in needed))
    others = keys.others([*declared, *required])
    least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
    rules = compiler.rules
    if least <= len(needed) and (most is None or (most >= len(members) and others is None)):
        return rules.add("object", f'"{{" ws {in_order(rules, members, others)} ws "}}"')
    if not members and others is not None and least <= 1 and (most is None or 0 < most >= least):
        return rules.add("map", f'"{{" ws {listed(rules, others, least, most)} ws "}}"')
    try:
        counted = in_order_counted(rules, members, others, least, None if most is None else int(most), compiler.spend)
    except ValueError as error:
        raise CannotEnforce(
            path, "minProperties" if least else "maxProperties", f"cannot be enforced: {error}"
        ) from None
    if counted is None and others is not None and least > 1:
        raise CannotEnforce(
            path, "minProperties", "more than one undeclared key cannot be enforced, it may be repeated"
        )
    if counted is None:
        raise NothingAdmitted(path, "no object has that many properties")
    return rules.add("object", f'"{{" ws {counted} ws "}}"')


class _Keys:
    """Which schema holds for the value of which key."""

    def __init__(self, compiler: Compiler, schema: Schema, path: str) -> None:
        self._compiler = compiler
        self._schema = schema
        self._path = path
        try:
            self._patterns = [
                (*pattern_to_terms(pattern), part) for pattern, part in schema.get("patternProperties", {}).items()
            ]
        except PatternRefused as error:
            raise CannotEnforce(path, "patternProperties", f"cannot be enforced: {error}") from None
        self._names = self._admitted_names()

    def _admitted_names(self) -> Term:
        names = self._schema.get("propertyNames", True)
        path = f"{self._path}.propertyNames"
        try:
            return either(string_term(one) for one in self._compiler.alternatives(names, path))
        except PatternRefused as error:
            raise CannotEnforce(self._path, "propertyNames", f"cannot be enforced: {error}") from None

    def value_of(self, name: str) -> Any:
        """The schema of the value of a declared or required key."""
        if not self._matches(self._names, name):
            return False
        # What only some dialects match is held to both ways.
        parts = [part for _, wide, part in self._patterns if self._matches(wide, name)]
        declared = self._schema.get("properties", {})
        if name in declared:
            parts.append(declared[name])
        elif not any(self._matches(sure, name) for sure, _, _ in self._patterns):
            parts.append(self._schema.get("additionalProperties", True))
        return both_parts(parts)

    def _matches(self, term: Term, name: str) -> bool:
        return term == EVERYTHING or matches(term, name, self._compiler.spend)

    def others(self, named: list[str]) -> str | None:
        """The rule of a member whose key is none of the named ones; None if none is written."""
        excluded = without(either(_beginnings(named)))
        members = []
        for term, schema in self._classes(named):
            try:
                value = self._compiler.inside(schema, f"{self._path}.additionalProperties")
            except NothingAdmitted:
                continue
            if key := self._key(both([term, self._names, excluded])):
                members.append(f'{key} ws ":" ws {value}')
        return self._compiler.rules.add("member", " | ".join(members)) if members else None

    def _key(self, term: Term) -> str | None:
        if term == EVERYTHING:
            return "string"
        rules = self._compiler.rules
        try:
            inner = regular_to_ebnf(term, rules, self._compiler.spend)
        except TooManyStates as error:
            keyword = next(
                key for key in ("patternProperties", "propertyNames", "additionalProperties") if key in self._schema
            )
            raise CannotEnforce(self._path, keyword, f"cannot be enforced: {error}") from None
        return None if inner is None else rules.add("key", f'"\\"" {inner} "\\""')

    def _classes(self, named: list[str]) -> Iterator[tuple[Term, Any]]:
        """Keys by the patterns that they match, with the schema of their values."""
        count = len(self._patterns)
        for size in range(1, 2 if count > _COMBINED_PATTERNS else count + 1):
            for chosen in combinations(range(count), size):
                terms = [self._patterns[i][0] if i in chosen else without(self._patterns[i][1]) for i in range(count)]
                yield both(terms), both_parts(self._patterns[i][2] for i in chosen)
        # Declared properties, if only that there are none, close an object: a tool without arguments gets none.
        others = self._schema.get("additionalProperties", "properties" not in self._schema and not named and not count)
        # Beside declared properties, others are written only when there is a schema for them.
        if others not in (True, {}) or (not count and not named):
            yield both([without(wide) for _, wide, _ in self._patterns]), others


def _beginnings(names: list[str]) -> list[Term]:
    """The names, or, where they are many, whatever begins as they do: each character of a name costs a state."""
    if sum(map(len, names)) <= _TOLD_BY:
        return [text(name) for name in names]
    most = max(1, _TOLD_BY // len(names))
    return [then(text(name[:most]), EVERYTHING) if len(name) > most else text(name) for name in names]
