"""A schema with combined parts as plain schemas, one of which a value has to match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from worker_node.errors import UnsupportedParameter
from worker_node.grammars.apart import overlaps_of
from worker_node.grammars.budget import MAX_DEPTH, Budget, OutOfSteps
from worker_node.grammars.merging import Contradiction, Merged
from worker_node.grammars.merging_objects import CannotMerge, Schema
from worker_node.grammars.negation import is_plain_exclusion, negated
from worker_node.grammars.refusals import CannotEnforce
from worker_node.grammars.shape import check_shape, with_type

# Keywords that hold schemas for the same value, or stand for some.
COMBINING = frozenset(
    {
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "additionalItems",
        "const",
    }
)
# What is left in a plain schema.
_STRAY = {"minContains": "contains", "maxContains": "contains"}
_NO_OBJECT = {"type": ["array", "string", "number", "boolean", "null"]}
MAX_ALTERNATIVES = 512
# What expanding and merging take however small the schemas are.
_STEPS = 4
_MERGE_STEPS = 8

Alternatives = list[Schema]


class Expansion:
    """Expands schemas. `resolve` follows a `$ref`; `accept` checks the keywords of a schema and returns those that
    count; `dropped` is called for a refusal of a keyword that may be left out, and raises it if it may not.
    """

    def __init__(
        self,
        budget: Budget,
        resolve: Callable[[str, str], Any],
        accept: Callable[[Schema, str], Schema],
        dropped: Callable[[CannotEnforce], None],
    ) -> None:
        self._budget = budget
        self._resolve = resolve
        self._accept = accept
        self._dropped = dropped
        self._depth = 0
        # Grows with each part that is negated.
        self._negations = 0

    def of(self, schema: Any, path: str) -> Alternatives:
        """The plain schemas, none if no value matches. Raises BadRequest, UnsupportedParameter naming the part."""
        if schema is True:
            return [{}]
        if schema is False:
            return []
        check_shape(schema, path)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnsupportedParameter(
                f"{path}: it is defined by itself or combined too deeply, the bound here is {MAX_DEPTH} levels",
                param=path,
            )
        try:
            return self._of(self._accept(schema, path), path)
        finally:
            self._depth -= 1

    def _of(self, schema: Schema, path: str) -> Alternatives:
        self._budget.spend(_STEPS)
        if not COMBINING & schema.keys() and not _STRAY.keys() & schema.keys():
            return [schema]
        negations = self._negations
        plain = {key: value for key, value in schema.items() if not self._combines(key, schema)}
        if "const" in schema:
            plain = self._merged([plain, {"enum": [schema["const"]]}], path) or {"enum": []}
            if not plain["enum"]:
                return []
        singles: Alternatives = [plain]
        choices: list[Alternatives] = []
        for options in self._parts(schema, path):
            if not options:
                return []
            if len(options) == 1:
                singles.append(options[0])
            else:
                choices.append(options)
        merged = self._merged(singles, path)
        found = [] if merged is None else [merged]
        for options in choices:
            found = [
                one for base in found for option in options if (one := self._merged([option, base], path)) is not None
            ]
            if len(choices) > 1 and len(found) > MAX_ALTERNATIVES:
                raise UnsupportedParameter(
                    f"{path}: its conditions have more than {MAX_ALTERNATIVES} combinations, the bound here", param=path
                )
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in schema:
                if self._negations > negations:
                    self._dropped(
                        CannotEnforce(path, keyword, "cannot be enforced beside not, if or overlapping oneOf")
                    )
                    continue
                found = [self._evaluated(one, keyword, schema[keyword], path) for one in found]
        return found

    @staticmethod
    def _combines(keyword: str, schema: Schema) -> bool:
        if keyword == "not":
            return not is_plain_exclusion(schema)
        if keyword in _STRAY:
            return _STRAY[keyword] not in schema
        return keyword in COMBINING

    def _parts(self, schema: Schema, path: str) -> Iterator[Alternatives]:
        """The alternatives of each part that has to hold."""
        if "$ref" in schema:
            yield self.of(self._resolve(schema["$ref"], path), path)
        for i, part in enumerate(schema.get("allOf", ())):
            yield self.of(part, f"{path}.allOf[{i}]")
        for i, part in enumerate(self._rewritten(schema)):
            yield self.of(part, f"{path}.{'dependentSchemas' if i else 'dependentRequired'}")
        if "if" in schema:
            yield from self._optional(schema, "if", path, self._condition)
        if "not" in schema and not is_plain_exclusion(schema):
            yield from self._optional(schema, "not", path, lambda one, _: self._negated(one["not"], f"{path}.not"))
        if "anyOf" in schema:
            yield [found for i, part in enumerate(schema["anyOf"]) for found in self.of(part, f"{path}.anyOf[{i}]")]
        if "oneOf" in schema:
            yield self.one_of(schema["oneOf"], path)

    def _optional(
        self, schema: Schema, keyword: str, path: str, expand: Callable[[Schema, str], Alternatives]
    ) -> Iterator[Alternatives]:
        """What a keyword says, unless it cannot be enforced and may be left out."""
        try:
            yield expand(schema, path)
        except OutOfSteps:
            raise
        except UnsupportedParameter as error:
            self._dropped(CannotEnforce(path, keyword, f"cannot be enforced ({error.message})"))

    def _condition(self, schema: Schema, path: str) -> Alternatives:
        if not {"then", "else"} & schema.keys():
            return [{}]
        met = self.of({"allOf": [schema["if"], schema.get("then", True)]}, f"{path}.then")
        otherwise = self._negated(schema["if"], f"{path}.if")
        if "else" in schema:
            otherwise = self._product(otherwise, self.of(schema["else"], f"{path}.else"), path)
        return met + otherwise

    def _negated(self, schema: Any, path: str) -> Alternatives:
        self._negations += 1
        if not isinstance(schema, bool):
            check_shape(schema, path)
            schema = self._accept(schema, path)
            self._budget.spend(sum(1 + len(value) for value in schema.values() if isinstance(value, list | dict)))
        return self.of(negated(schema, path, lambda target: self._resolve(target, path)), path)

    def _product(self, one: Alternatives, other: Alternatives, path: str) -> Alternatives:
        return [both for a in one for b in other if (both := self._merged([a, b], path)) is not None]

    @staticmethod
    def _rewritten(schema: Schema) -> Iterator[Any]:
        """Dependencies as a choice: without the member, or with what it needs."""
        needs: dict[str, list[Any]] = {}
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, need in schema.get(keyword, {}).items():
                needs.setdefault(name, []).append({"required": need} if isinstance(need, list) else need)
        for name, all_needs in needs.items():
            if all(need is True or need in ({}, {"required": []}) for need in all_needs):
                continue
            absent = {"type": "object", "properties": {name: False}}
            present = {"type": "object", "required": [name]}
            yield {"anyOf": [{"allOf": [present, *all_needs]}, absent, _NO_OBJECT]}

    def one_of(self, parts: list[Any], path: str) -> Alternatives:
        """The alternatives of exactly one of the schemas."""
        found = [self.of(part, f"{path}.oneOf[{i}]") for i, part in enumerate(parts)]
        overlapping = self.overlapping(found)
        # Told apart by what is written for them, so they have to keep to that beside other keywords.
        found = [[with_type(one) for one in options] for options in found]
        if not overlapping:
            return [one for options in found for one in options]
        only: Alternatives = []
        try:
            for i, options in enumerate(found):
                for j in overlapping.get(i, ()):
                    options = self._product(options, self._negated(parts[j], f"{path}.oneOf[{j}]"), path)  # noqa: PLW2901
                    if len(options) > MAX_ALTERNATIVES:
                        raise CannotEnforce(path, "oneOf", "its parts have too many combinations")
                only += options
        except OutOfSteps:
            raise
        except UnsupportedParameter as error:
            self._dropped(
                CannotEnforce(
                    path,
                    "oneOf",
                    "a value could match two of these; use anyOf, or a required property that tells them apart "
                    f"({error.message})",
                )
            )
            return [one for options in found for one in options]
        return only

    def overlapping(self, found: list[Alternatives]) -> dict[int, list[int]]:
        """Which of the choices cannot be told apart, by index."""
        overlaps: dict[int, list[int]] = {}
        groups = [(i, one) for i, options in enumerate(found) for one in options]
        for i, j in overlaps_of(groups, self._budget.spend):
            overlaps.setdefault(i, []).append(j)
            overlaps.setdefault(j, []).append(i)
        return {i: list(dict.fromkeys(others)) for i, others in overlaps.items()}

    @staticmethod
    def _evaluated(plain: Schema, keyword: str, value: Any, path: str) -> Schema:
        """What no part of the schema looks at, as the plain schema says it."""
        if keyword == "unevaluatedProperties":
            return {"additionalProperties": value} | plain
        if "contains" in plain:
            raise CannotEnforce(path, keyword, "cannot be enforced beside contains")
        return {"items": value} | plain

    def _merged(self, schemas: list[Schema], path: str) -> Schema | None:
        """One schema for values that match all of these; None if there are none."""
        schemas = [schema for schema in schemas if schema]
        if len(schemas) < 2:
            return schemas[0] if schemas else {}
        merged = Merged(self._budget)
        self._budget.spend(_MERGE_STEPS)
        try:
            for schema in schemas:
                merged.add(schema)
        except CannotMerge as error:
            raise UnsupportedParameter(
                f"{path}: two conditions on the same value cannot be enforced at once ({error})", param=path
            ) from None
        except Contradiction:
            return None
        return merged.schema()
