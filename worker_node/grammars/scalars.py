"""Strings of a schema as EBNF. Each raises UnsupportedParameter or BadRequest, naming the part."""

from __future__ import annotations

from collections.abc import Callable

from worker_node.grammars.ebnf import Rules
from worker_node.grammars.formats import FORMAT_RULES, FORMATS, REFUSED
from worker_node.grammars.merging_objects import Schema
from worker_node.grammars.pattern import PatternRefused, pattern_to_ebnf
from worker_node.grammars.refusals import CannotEnforce, NothingAdmitted
from worker_node.grammars.regular import TooManyStates, regular_to_ebnf
from worker_node.grammars.repetition import repeated
from worker_node.grammars.texts import string_term

# Counting costs the runtime time and memory: a longer text or list is simply not written.
MAX_COUNT = 2048
# A length beside a pattern becomes states of an automaton.
_MAX_STATES_OF_LENGTH = 200


def string(rules: Rules, spend: Callable[[], None], schema: Schema, path: str) -> str:
    """A string, with a length, a format, patterns, or constants that it must not be."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    counted = bool(least or most is not None)
    held = [key for key in ("pattern", "format") if key in schema and _is_held(key, schema[key], path)]
    if most is not None and most < least:
        raise NothingAdmitted(path, "maxLength is below minLength")
    if "format" in held:
        if len(held) + counted + ("not" in schema) > 1:
            raise CannotEnforce(path, "format", "cannot be enforced beside another condition on the string")
        rules.include(FORMAT_RULES)
        return rules.add("format", f'"\\"" ({FORMATS[schema["format"]]}) "\\""')
    pattern = schema.get("pattern")
    if "not" in schema or (held and counted) or isinstance(pattern, tuple):
        return _automaton(rules, spend, schema, path)
    if pattern is not None:
        try:
            inner = pattern_to_ebnf(pattern, rules, spend)
        except PatternRefused as error:
            raise CannotEnforce(path, "pattern", f"cannot be enforced: {error}") from None
        if inner is None:
            raise NothingAdmitted(path, "no text matches the pattern")
        return rules.add("text", f'"\\"" {inner} "\\""')
    if not counted:
        return "string"
    if least > MAX_COUNT:
        raise CannotEnforce(path, "minLength", f"{least} cannot be enforced, the bound here is {MAX_COUNT}")
    body = repeated(rules, "char", least, None if most is None else min(most, MAX_COUNT))
    return rules.add("text", f'"\\"" {body} "\\""')


def _automaton(rules: Rules, spend: Callable[[], None], schema: Schema, path: str) -> str:
    keyword = next(key for key in ("pattern", "not") if key in schema)
    most = schema.get("maxLength")
    if schema.get("minLength", 0) > _MAX_STATES_OF_LENGTH or (most is not None and most > _MAX_STATES_OF_LENGTH):
        # The longer texts are not written: a pattern that ends by itself is shorter anyway.
        schema = schema | {"maxLength": _MAX_STATES_OF_LENGTH}
        if schema.get("minLength", 0) > _MAX_STATES_OF_LENGTH:
            raise CannotEnforce(path, "minLength", "cannot be enforced beside a pattern")
    try:
        term = string_term(schema)
        inner = regular_to_ebnf(term, rules, spend)
    except (PatternRefused, TooManyStates) as error:
        raise CannotEnforce(
            path, keyword, f"cannot be enforced beside another condition on the string: {error}"
        ) from None
    if inner is None:
        raise NothingAdmitted(path, "no text matches all of its conditions")
    return rules.add("text", f'"\\"" {inner} "\\""')


def _is_held(keyword: str, value: str, path: str) -> bool:
    if keyword == "format" and value in REFUSED:
        raise CannotEnforce(path, "format", f"{value} cannot be enforced")
    return keyword == "pattern" or value in FORMATS
