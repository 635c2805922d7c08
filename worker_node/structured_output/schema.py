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
from worker_node.structured_output.cost import MAX_DEPTH, MAX_GRAMMAR_CHARACTERS, Budget, check_cost, too_large
from worker_node.structured_output.ebnf import Rules, compact_json, json_literal, one_text
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
from worker_node.structured_output.pattern import PatternRefused, pattern_term, term_to_ebnf
from worker_node.structured_output.regular import EVERYTHING, Term, both, either, matches
from worker_node.structured_output.scalars import number, string, string_term

MAX_COUNT = 2048
_ONE_MORE = "more than one cannot be enforced beyond the required properties"
_TOO_FEW = "minProperties asks for more properties than are declared, and no others are written here"


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
        raise BadRequest.at(where, "a value in the schema is nested too deeply") from None


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
            "object": self._object,
            "array": self._array,
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
            raise UnsupportedParameter.at(
                path, f"the schema is too deep to be enforced: the bound here is {MAX_DEPTH} levels"
            )
        if self.rules.size > MAX_GRAMMAR_CHARACTERS:
            raise too_large(path, self.rules.size)
        self.spend()
        try:
            return self._rule(schema, path)
        finally:
            self._depth -= 1

    def inside(self, schema: Any, path: str) -> str | NothingAdmitted:
        """A rule for a part, where a definition may be used in itself; the reason, if it has no value to write."""
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
            raise BadRequest.at(f"{path}.$ref", f"{target[:100]!r} is defined by itself")
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
        kinds = types_of({"type": schema["type"]}) if "type" in schema else list(TYPES)
        for keyword in sorted(schema.keys() - {"enum", "type"}):
            self._drop(CannotEnforce(path, keyword, "cannot be enforced beside enum or const"))
        values = [value for value in schema["enum"] if any(TYPES[kind](value) for kind in kinds)]
        try:
            constants = one_text(map(compact_json, values))
        except ValueError:
            raise BadRequest.at(path, "a constant that cannot be written in JSON") from None
        if not constants:
            raise NothingAdmitted(path)
        return self.rules.add("const", constants)

    def _object(self, schema: Schema, path: str) -> str:
        """An object has its declared properties in order, or any number of keys of one kind."""
        needed = dict.fromkeys(schema.get("required", ()))
        declared = schema.get("properties", {})
        if declared or needed:
            body = self._members(schema, path, declared, needed)
        else:
            body = self._keys_of_one_kind(schema, path)
        return self.rules.add("object", f'"{{" ws {body} ws "}}"')

    def _members(self, schema: Schema, path: str, declared: dict[str, Any], needed: dict[str, None]) -> str:
        """Declared and required properties, and no others, even where the schema allows them."""
        if "patternProperties" in schema:
            raise CannotEnforce(path, "patternProperties", "cannot be enforced beside other properties")
        keys, others = self._key_term(schema, path), schema.get("additionalProperties", True)
        members = []
        for name in dict.fromkeys([*declared, *needed]):
            where = f"{path}.properties.{name[:100]}"
            if keys == EVERYTHING or matches(keys, name, self.spend):
                value = self.inside(declared.get(name, others), where)
            else:
                value = NothingAdmitted(where, "propertyNames does not match the name")
            if isinstance(value, str):
                members.append((f'{json_literal(name)} ws ":" ws {value}', name in needed))
            elif name in needed:
                raise value
        least, most = _counts(schema, path, "Properties")
        if most is not None and most < len(needed):
            raise NothingAdmitted(path, "more properties are required than maxProperties allows")
        if len(members) < least:
            raise NothingAdmitted(path, _TOO_FEW)
        if least > max(1, len(needed)):
            raise CannotEnforce(path, "minProperties", _ONE_MORE)
        if most is not None and most < len(members):
            raise CannotEnforce(path, "maxProperties", "cannot be enforced beside as many declared properties")
        # The runtime compiles a row of optional members in quadratic time: 0.8 s for 440, 18 s for 1,500.
        self.spend((len(members) - len(needed)) ** 2)
        return _in_order(self.rules, members, any_one=least > 0)

    def _keys_of_one_kind(self, schema: Schema, path: str) -> str:
        """Any number of members, whose keys match one pattern or are any. A key may be repeated."""
        least, most = _counts(schema, path, "Properties")
        # A key may be repeated, so that several count as one.
        if least > 1:
            raise CannotEnforce(path, "minProperties", _ONE_MORE)
        keys, patterns = self._key_term(schema, path), schema.get("patternProperties", {})
        # Declared properties, if only that there are none, close an object: a tool without arguments gets none.
        values = schema.get("additionalProperties", "properties" not in schema)
        if patterns:
            if len(patterns) > 1 or schema.get("additionalProperties") not in (None, True, False, {}):
                raise CannotEnforce(path, "patternProperties", "only one kind of key can be enforced")
            ((pattern, values),) = patterns.items()
            try:
                keys = both([keys, pattern_term(pattern, search=True)])
            except PatternRefused as error:
                raise CannotEnforce(path, "patternProperties", f"cannot be enforced: {error}") from None
        key = "string" if keys == EVERYTHING else self._key(keys, path, "patternProperties" if patterns else "")
        value = None if most == 0 or key is None else self.inside(values, f"{path}.additionalProperties")
        if not isinstance(value, str):
            if least:
                raise NothingAdmitted(path, _TOO_FEW)
            return '""'
        return _listed(self.rules, self.rules.add("member", f'{key} ws ":" ws {value}'), least, most)

    def _key_term(self, schema: Schema, path: str) -> Term:
        """The keys that match `propertyNames`."""
        try:
            names = self.alternatives(schema.get("propertyNames", True), f"{path}.propertyNames")
            return either(string_term(one) for one in names)
        except PatternRefused as error:
            raise CannotEnforce(path, "propertyNames", f"cannot be enforced: {error}") from None

    def _key(self, keys: Term, path: str, keyword: str) -> str | None:
        try:
            inner = term_to_ebnf(keys, self.rules, self.spend)
        except PatternRefused as error:
            raise CannotEnforce(path, keyword or "propertyNames", f"cannot be enforced: {error}") from None
        return None if inner is None else self.rules.add("key", f'"\\"" {inner} "\\""')

    def _array(self, schema: Schema, path: str) -> str:
        least, most = _counts(schema, path, "Items")
        if least > MAX_COUNT:
            raise CannotEnforce(path, "minItems", f"{least} cannot be enforced, the bound here is {MAX_COUNT}")
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise CannotEnforce(path, "uniqueItems", "can be enforced only where maxItems is 1")
        body = self._items(schema, path, least, most)
        return self.rules.add("array", f'"[" ws {body} ws "]"')

    def _items(self, schema: Schema, path: str, least: int, most: int | None) -> str:
        """All items that have a place are written, as far as may be, and none after them unless asked for."""
        rules = self.rules
        first: list[str] = []
        for index, part in enumerate(schema.get("prefixItems", ())):
            item = None if most == index else self.inside(part, f"{path}.prefixItems[{index}]")
            if not isinstance(item, str):
                if isinstance(item, NothingAdmitted) and least > index:
                    raise item
                return ' ws "," ws '.join(first) or '""'
            first.append(item)
        # Where more items are needed, whatever may come after the places is written.
        others = schema.get("items", least > len(first) or not first)
        item = None if most == len(first) else self.inside(others, f"{path}.items")
        if isinstance(item, NothingAdmitted) and least > len(first):
            raise item
        places = ' ws "," ws '.join(first)
        if not isinstance(item, str):
            return places or '""'
        if not first:
            return _listed(rules, item, least, most)
        following = rules.add("next", f'ws "," ws {item}')
        high = None if most is None else min(most - len(first), MAX_COUNT)
        return f"{places} {rules.repeated(following, max(0, least - len(first)), high)}"


def _in_order(rules: Rules, members: list[tuple[str, bool]], *, any_one: bool) -> str:
    """Members in order, those that are not needed left out or not; with `any_one`, not all of them."""
    rest, begun = None if any_one else '""', '""'
    for text, needed in reversed(members):
        name, after = rules.add("member", text), rules.add("more", begun)
        without = "" if needed or rest is None else f" | {rules.add('rest', rest)}"
        rest = f"{name} {after}{without}"
        begun = f'ws "," ws {name} {after}' if needed else f'(ws "," ws {name})? {after}'
    return rules.add("members", rest or '""')


def _counts(schema: Schema, path: str, what: str) -> tuple[int, int | None]:
    least = int(schema.get(f"min{what}", 0))
    most = None if f"max{what}" not in schema else int(schema[f"max{what}"])
    if most is not None and most < least:
        raise NothingAdmitted(path, f"max{what} is below min{what}")
    return least, most


def _listed(rules: Rules, item: str, least: int, most: int | None) -> str:
    following = rules.add("next", f'ws "," ws {item}')
    rest = rules.repeated(following, max(0, least - 1), None if most is None else min(most, MAX_COUNT) - 1)
    return f"({item} {rest})" if least else f"({item} {rest})?"
