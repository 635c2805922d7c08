"""The grammars held to independent judges: the validator jsonschema-rs, and pydantic's own models.

What a grammar admits is valid: texts sampled from it, and texts that differ from these in a character or a value, so
far as the grammar admits them too. The other way round, texts that the judge accepts, and that are written as the
grammar writes them, are admitted.
"""

import contextlib
import json
import operator
import random
import re

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.recogniser import Recogniser
from tests.unit.worker_node.structured_output.sampler import Sampler
from tests.unit.worker_node.structured_output.user_schemas import (
    framework_schemas,
    javascript_schemas,
    pydantic_schemas,
)
from worker_node.core.errors import BadRequest
from worker_node.structured_output.keywords import comparable
from worker_node.structured_output.schema import compile_schema

VALUES = [None, True, False, 0, 1, -1, 2.5, 10**15, 10**17, "", "a", "ab", "é", [], [1], {}, {"a": 1}]
NEW_CHARACTERS = ["0", "9", ".", "-", "e", '"', ",", "a", "Z", " ", "é", "\\", ""]
# Lists of `items` are of draft 7, booleans as exclusive bounds of draft 4.
DRAFTS = (jsonschema_rs.Draft202012Validator, jsonschema_rs.Draft7Validator, jsonschema_rs.Draft4Validator)


def validator_of(schema):
    text = json.dumps(schema)
    if isinstance(schema, dict):
        schema = json.loads(text, object_hook=_without_annotations)
    for draft in DRAFTS:
        with contextlib.suppress(jsonschema_rs.ValidationError):
            return draft(schema, validate_formats=True)
    return jsonschema_rs.validator_for(schema)


def _without_annotations(schema):
    # The validator takes contentEncoding for a condition, which the standard does not.
    return {key: part for key, part in schema.items() if key not in {"$schema", "contentEncoding"}}


def changed_characters(text, chance):
    """The text with a character left out, put in, repeated or replaced."""
    place = chance.randrange(len(text))
    return text[:place] + chance.choice([*NEW_CHARACTERS, text[place] * 2]) + text[place + chance.randint(0, 1) :]


def changed_value(value, chance):
    """The value with a part of it, or all of it, replaced, left out or repeated."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        if chance.random() < 0.3:
            return {key: part for key, part in value.items() if key != name} | chance.choice([{}, {"other": 1}])
        return {key: changed_value(part, chance) if key == name else part for key, part in value.items()}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        new = chance.choice([[], [value[place]] * 2, [changed_value(value[place], chance)]])
        return [*value[:place], *new, *value[place + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and chance.random() < 0.7:
        return value + chance.choice([-1, 1, 0.01, -0.5, 10**16, -(10**16)])
    return chance.choice(VALUES)


def written_alike(text, chance):
    """The text with a letter of a string, or a later digit of a number, replaced by another; None if there is none."""
    values = [match for match in re.finditer(r'"(?:[^"\\]|\\.)*"(\s*:)?|\d[\d.]*', text) if not match[1]]
    changes = r"(?<=[a-z])[a-z](?=[a-z\"])|(?<=\d)\d"
    places = [match.start() + change.start() for match in values for change in re.finditer(changes, match[0])]
    if not places or "\\" in text:
        return None
    place = chance.choice(places)
    return text[:place] + chance.choice("0123456789" if text[place].isdigit() else "abcdefghij") + text[place + 1 :]


def judge(schema, *, count=8, seed=0, takes=lambda text: None):
    """Sample the grammar and vary the texts. Of valid ones that are written alike: how many there were, and how many
    the grammar admits."""
    chance, grammar = random.Random(seed), compile_schema(schema, "schema")
    validator, sampler, held = validator_of(schema), Sampler(grammar), Recogniser(grammar)
    texts = sorted({text for _ in range(count) if (text := sampler.sample(chance)) is not None})
    assert texts
    valid = admitted = 0
    for text in texts:
        value = json.loads(text)
        assert validator.is_valid(value), text
        takes(text)
        mutants = [changed_characters(text, chance) for _ in range(6)]
        mutants += [json.dumps(changed_value(value, chance), ensure_ascii=False) for _ in range(6)]
        for mutant in mutants:
            assert not held.admits(mutant) or validator.is_valid(json.loads(mutant)), mutant
        if (alike := written_alike(text, chance)) is not None and validator.is_valid(json.loads(alike)):
            valid += 1
            admitted += held.admits(alike)
    return valid, admitted


@pytest.mark.parametrize("model", list(pydantic_schemas()), ids=operator.itemgetter(0))
def test_what_is_admitted_for_a_model_of_pydantic_is_valid_and_the_model_takes_it(model):
    _, schema, takes = model
    judge(schema, count=30, takes=takes)


# A set of any numbers, a negation, and closed objects that no value matches at once.
REFUSED = {
    "TypeBox: object": "uniqueItems",
    "zod 3: set": "uniqueItems",
    "zod 3, named: set": "uniqueItems",
    "TypeBox: not": "not",
}
REFUSED |= dict.fromkeys([f"zod 3{form}: intersected_union" for form in ("", ", OpenAPI", ", named")], "no value")


@pytest.mark.parametrize("schemas", [javascript_schemas(), framework_schemas()], ids=["JavaScript", "frameworks"])
def test_what_is_admitted_for_a_schema_of_users_is_valid(schemas):
    alike = []
    for name, schema in schemas:
        if name in REFUSED:
            with pytest.raises(BadRequest, match=REFUSED[name]):
                compile_schema(schema, "schema")
        else:
            alike.append(judge(schema, count=12))
    valid, admitted = map(sum, zip(*alike, strict=True))
    assert admitted >= 0.9 * valid > 30


# Generated schemas.
NAMES = st.sampled_from(["a", "b", "ab", "x-1", "kind"])
SMALL = st.integers(0, 3)
NUMBERS = st.integers(-6, 12)
# jsonschema-rs compares floats with whole numbers of about 2**62 inexactly; test_numbers.py has larger bounds.
LIMITS = NUMBERS | st.sampled_from([0.5, -2.25, 10**15, 10**17, -(10**17), 2**53, 1e22, 1e300, -1e300])
BOUNDS = st.dictionaries(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), LIMITS, min_size=1, max_size=2
)
CONSTANTS = st.sampled_from([None, True, 0, 1, 1.0, 2.5, "", "a", "b", "ab", [], [1], {}, {"a": 1}])
SEVERAL_CONSTANTS = st.lists(CONSTANTS, min_size=1, max_size=3, unique_by=comparable)
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]{1,2}$", "x-", r"^\d+$", "^(a|b)*$", ".", "^[^a]"])
KINDS = st.sampled_from(["integer", "number"])
STEPS = st.sampled_from([0.01, 0.1, 0.5, 1, 2, 3, 5, 10, 30, 100])
FORMATS = st.sampled_from(["date", "date-time", "time", "uuid", "ipv4", "ipv6", "email", "uri", "hostname", "duration"])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])

LEAVES = st.one_of(
    st.sampled_from([True, False, {}]),
    st.builds(lambda kind: {"type": kind}, TYPES),
    st.builds(lambda kinds: {"type": kinds}, st.lists(TYPES, min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, CONSTANTS),
    st.builds(lambda values: {"enum": values}, SEVERAL_CONSTANTS),
    st.builds(lambda bounds: {"type": "integer"} | bounds, BOUNDS),
    st.builds(lambda bounds: {"type": "number"} | bounds, BOUNDS),
    st.builds(lambda kind, step: {"type": kind, "multipleOf": step}, KINDS, STEPS),
    st.builds(lambda kind, step, bounds: {"type": kind, "multipleOf": step} | bounds, KINDS, STEPS, BOUNDS),
    st.builds(lambda low, high: {"type": "string", "minLength": low, "maxLength": high}, SMALL, SMALL),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, PATTERNS),
    st.builds(lambda pattern, low: {"pattern": pattern, "minLength": low}, PATTERNS, SMALL),
    st.builds(lambda names: {"required": names}, st.lists(NAMES, max_size=2, unique=True)),
    st.builds(lambda name, pattern: {"type": "string", "format": name, "pattern": pattern}, FORMATS, PATTERNS),
    st.builds(lambda name, low: {"type": "string", "format": name, "minLength": low}, FORMATS, SMALL),
    st.builds(lambda low, high: {"minProperties": low, "maxProperties": high}, SMALL, SMALL),
    st.builds(lambda low, high: {"minItems": low, "maxItems": high}, SMALL, SMALL),
)  # fmt: skip


def with_property(part, name):
    return {"properties": {name: part}, "required": [name]}


def tagged(parts, required):
    """A union as pydantic writes it: the tag is not required where it has a default."""
    choices = [{"properties": {"kind": {"const": f"k{i}"}, "x": part}} for i, part in enumerate(parts)]
    return {"oneOf": [choice | ({"required": ["kind"]} if required else {}) for choice in choices]}


def compound(inner):
    parts = st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda parts: {"type": "object", "properties": parts, "required": list(parts)[:1]}, parts),
        st.builds(lambda parts, other: {"properties": parts, "additionalProperties": other}, parts, inner),
        st.builds(lambda pattern, part: {"type": "object", "patternProperties": {pattern: part}}, PATTERNS, inner),
        st.builds(lambda names, part: {"propertyNames": names, "additionalProperties": part}, inner, inner),
        st.builds(lambda parts: {"properties": parts, "unevaluatedProperties": False}, parts),
        st.builds(lambda part: {"type": "array", "items": part, "maxItems": 3}, inner),
        st.builds(lambda parts, part: {"prefixItems": parts, "items": part}, several, inner),
        st.builds(lambda part: {"items": part, "uniqueItems": True}, inner),
        st.builds(tagged, several, st.booleans()),
        st.builds(
            lambda parts: {"oneOf": [with_property(one, name) for one, name in zip(parts, "abc", strict=False)]},
            several,
        ),
        st.builds(lambda part, more: {"allOf": [part, more], "unevaluatedProperties": False}, inner, inner),
        st.builds(lambda keyword, parts: {keyword: parts}, st.sampled_from(["anyOf", "allOf", "oneOf"]), several),
        st.builds(lambda a, b: a | b if isinstance(a, dict) and isinstance(b, dict) else a, inner, inner),
    )


SCHEMAS = st.recursive(LEAVES, compound, max_leaves=8)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 2**32))
@example({"propertyNames": {"minLength": 1, "maxLength": 0}, "additionalProperties": True}, 0)
@example({"minProperties": 1, "maxProperties": 0}, 0)
@example({"oneOf": [{"type": "null"}, {"oneOf": [{"properties": {"kind": {"const": "k"}}}]}]}, 0)
def test_what_is_admitted_for_a_generated_schema_is_valid(schema, seed):
    with contextlib.suppress(BadRequest):
        judge(schema, seed=seed)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_is_admitted_for_thousands_of_generated_schemas_is_valid(schema, seed):
    with contextlib.suppress(BadRequest):
        judge(schema, seed=seed, count=16)
