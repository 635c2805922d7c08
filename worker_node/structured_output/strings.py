"""Strings of a schema as EBNF: lengths, formats and patterns, each alone or all at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from worker_node.structured_output.ebnf import Rules
from worker_node.structured_output.keywords import TYPES, CannotEnforce, NothingAdmitted, Schema
from worker_node.structured_output.pattern import PatternRefused, pattern_term, term_to_ebnf
from worker_node.structured_output.regular import (
    ANY_CHARACTER,
    EVERYTHING,
    NOTHING,
    Term,
    TooManyStates,
    both,
    either,
    lengths,
    matches,
    regular_to_ebnf,
    text,
    times,
)

# Counting costs the runtime time and memory: a longer text is simply not written, beside a pattern still earlier.
MAX_LENGTH = 2048
_MAX_LENGTH_OF_AN_AUTOMATON = 200

_DATE = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[-+]{_HOUR}:[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Two hyphens in a row would begin an encoded name, as in "xn--".
_LABEL = "[a-z0-9]{1,15}(-[a-z0-9]{1,10}){0,3}"
_HOST = rf"({_LABEL}\.){{1,3}}[a-z]{{2,12}}"
_EMAIL = rf"[a-zA-Z0-9_+-]{{1,30}}(\.[a-zA-Z0-9_+-]{{1,15}})?@{_HOST}"
_WORD = "[a-zA-Z0-9._~-]"
_PATH = rf"(/{_WORD}{{0,40}}){{0,8}}(\?{_WORD}{{0,40}}={_WORD}{{0,40}})?"
_LINK = f"https?://{_HOST}{_PATH}"
_REFERENCE = f"{_LINK}|/{_WORD}{{0,40}}{_PATH}"
_POINTER = "(/[a-zA-Z0-9._-]{0,15}){0,5}"
_GROUP = "[0-9a-f]{1,4}"
# Groups on both sides of the `::` that stands for those left out.
_SHORT = "|".join(f"{_GROUP}(:{_GROUP}){{{n - 1}}}::({_GROUP}(:{_GROUP}){{0,{5 - n}}})?" for n in range(1, 6))
_SPAN = "[0-9]{1,4}"
_DAYS = f"({_SPAN}Y({_SPAN}M({_SPAN}D)?)?|{_SPAN}M({_SPAN}D)?|{_SPAN}D)"
_HOURS = f"T({_SPAN}H({_SPAN}M({_SPAN}S)?)?|{_SPAN}M({_SPAN}S)?|{_SPAN}S)"
# Formats of the JSON Schema standard, as expressions of their common forms. Other formats are annotations.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"{_GROUP}(:{_GROUP}){{7}}|::({_GROUP}(:{_GROUP}){{0,5}})?|{_SHORT}|{_GROUP}(:{_GROUP}){{5}}::",
    **dict.fromkeys(("hostname", "idn-hostname"), _HOST),
    **dict.fromkeys(("email", "idn-email"), _EMAIL),
    **dict.fromkeys(("uri", "uri-template", "iri"), _LINK),
    **dict.fromkeys(("uri-reference", "iri-reference"), _REFERENCE),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]{{0,3}}){_POINTER}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|{_SPAN}W)",
}
REFUSED_FORMATS = frozenset({"regex"})
# Counts of two digits keep texts short; in an automaton each would be states.
_COUNT = re.compile(r"\{([01]),\d\d\}")


def string(rules: Rules, spend: Callable[[], None], schema: Schema, path: str) -> str:
    """The rule of a string with a length, a format and patterns. Raises CannotEnforce, NothingAdmitted."""
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength", math.inf)
    if most < least:
        raise NothingAdmitted(path, "maxLength is below minLength")
    expressions = _expressions(schema, path)
    if not expressions:
        if not least and most == math.inf:
            return "string"
        if least > MAX_LENGTH:
            raise CannotEnforce(path, "minLength", f"{least} cannot be enforced, the bound here is {MAX_LENGTH}")
        counted = rules.repeated("char", least, None if most == math.inf else min(int(most), MAX_LENGTH))
        return rules.add("text", f'"\\"" {counted} "\\""')
    keyword = "format" if schema.get("format") in FORMATS else "pattern"
    try:
        alone = pattern_term(expressions[0], search=False)
        shortest, longest = lengths(alone)
        if len(expressions) == 1 and least <= shortest and longest <= most:
            inner = term_to_ebnf(alone, rules, spend)
        else:
            if least > _MAX_LENGTH_OF_AN_AUTOMATON:
                raise CannotEnforce(path, "minLength", "cannot be enforced beside a pattern or a format")
            inner = regular_to_ebnf(string_term(schema, most=_MAX_LENGTH_OF_AN_AUTOMATON), rules, spend)
    except (PatternRefused, TooManyStates) as error:
        beside = " beside another condition on the string" * (len(expressions) > 1 or "maxLength" in schema)
        raise CannotEnforce(path, keyword, f"cannot be enforced{beside}: {error}") from None
    if inner is None:
        raise NothingAdmitted(path, "no text matches all of its conditions")
    return rules.add("text", f'"\\"" {inner} "\\""')


def _expressions(schema: Schema, path: str) -> list[str]:
    """The expressions that the string has to match, the format's as one of them."""
    patterns = schema.get("pattern", ())
    name = schema.get("format")
    if name in REFUSED_FORMATS:
        raise CannotEnforce(path, "format", f"{name} cannot be enforced")
    return [*((patterns,) if isinstance(patterns, str) else patterns), *([FORMATS[name]] if name in FORMATS else [])]


def string_term(schema: Schema, most: int | None = None) -> Term:
    """The strings that match a plain schema, none longer than `most`. Raises PatternRefused."""
    if "string" not in schema.get("type", "string"):
        return NOTHING
    conditions = []
    if "enum" in schema:
        conditions.append(either(text(value) for value in schema["enum"] if isinstance(value, str)))
    patterns = schema.get("pattern", ())
    conditions += [pattern_term(one, search=True) for one in ((patterns,) if isinstance(patterns, str) else patterns)]
    if schema.get("format") in FORMATS:
        loose = _COUNT.sub(lambda count: "*" if count[1] == "0" else "+", FORMATS[schema["format"]])
        conditions.append(pattern_term(loose, search=False))
    if "minLength" in schema or "maxLength" in schema:
        longest = min(schema.get("maxLength", math.inf), math.inf if most is None else most)
        longest_or_none = None if longest == math.inf else int(longest)
        conditions.append(times(ANY_CHARACTER, int(schema.get("minLength", 0)), longest_or_none))
    return both(conditions) if conditions else EVERYTHING


def fits(value: Any, schema: Schema, spend: Callable[[], None]) -> bool:
    """Whether a constant that is no list or object matches a plain schema. Raises PatternRefused, ValueError."""
    if isinstance(value, str):
        if schema.get("format") in FORMATS:
            raise PatternRefused("a format beside constants")
        return matches(string_term({key: part for key, part in schema.items() if key != "enum"}), value, spend)
    if isinstance(value, list | dict):
        raise ValueError("a constant that is a list or an object")
    if isinstance(value, bool) or value is None or not TYPES["number"](value):
        return True
    if schema.get("multipleOf", 1) != 1:
        raise ValueError("multipleOf")
    return all(key not in schema or holds(value, schema[key]) for key, holds in _BOUNDS.items())


_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
