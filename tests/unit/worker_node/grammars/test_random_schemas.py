"""Random schemas of the supported keywords: every text that their grammars admit is valid."""

import contextlib
import json

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.recogniser import Recogniser
from tests.support.sampler import Sampler
from worker_node.errors import BadRequest
from worker_node.grammars.merging import comparable
from worker_node.grammars.schema import compile_schema

NAMES = st.sampled_from(["a", "b", "ab", "x-1", "kind"])
SEVERAL_NAMES = st.lists(NAMES, min_size=1, max_size=3, unique=True)
SMALL = st.integers(0, 3)
NUMBERS = st.integers(-6, 12)
CONSTANTS = st.sampled_from([None, True, 0, 1, 1.0, 2.5, "", "a", "b", "ab", [], [1], {}, {"a": 1}])
SEVERAL_CONSTANTS = st.lists(CONSTANTS, min_size=1, max_size=3, unique_by=comparable)
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]{1,2}$", "x-", r"^\d+$", "^(a|b)*$", ".", "^[^a]"])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])

LEAVES = st.one_of(
    st.sampled_from([True, False, {}]),
    st.builds(lambda kind: {"type": kind}, TYPES),
    st.builds(lambda kinds: {"type": kinds}, st.lists(TYPES, min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, CONSTANTS),
    st.builds(lambda values: {"enum": values}, SEVERAL_CONSTANTS),
    st.builds(lambda low: {"type": "integer", "minimum": low}, NUMBERS),
    st.builds(lambda low, high: {"exclusiveMinimum": low, "maximum": high}, NUMBERS, NUMBERS),
    st.builds(lambda step: {"type": "integer", "multipleOf": step}, st.sampled_from([1, 2, 3, 10])),
    st.builds(lambda step: {"type": "number", "multipleOf": step}, st.sampled_from([0.1, 5, 100])),
    st.builds(lambda low, high: {"type": "string", "minLength": low, "maxLength": high}, SMALL, SMALL),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, PATTERNS),
    st.builds(lambda pattern, low: {"pattern": pattern, "minLength": low}, PATTERNS, SMALL),
    st.builds(lambda names: {"required": names}, st.lists(NAMES, max_size=2, unique=True)),
    st.builds(lambda names: {"dependentRequired": {names[0]: names[1:]}}, SEVERAL_NAMES),
    st.builds(lambda low, high: {"minProperties": low, "maxProperties": high}, SMALL, SMALL),
    st.builds(lambda low, high: {"minItems": low, "maxItems": high}, SMALL, SMALL),
)  # fmt: skip


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
        st.builds(lambda parts: {"prefixItems": parts, "unevaluatedItems": False}, several),
        st.builds(lambda part, low: {"contains": part, "minContains": low, "maxItems": 4}, inner, SMALL),
        st.builds(lambda part, low: {"contains": part, "maxContains": low}, inner, SMALL),
        st.builds(lambda part: {"items": part, "uniqueItems": True}, inner),
        st.builds(lambda keyword, parts: {keyword: parts}, st.sampled_from(["anyOf", "allOf", "oneOf"]), several),
        st.builds(lambda part: {"not": part}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda name, part: {"dependentSchemas": {name: part}}, NAMES, inner),
        st.builds(lambda a, b: a | b if isinstance(a, dict) and isinstance(b, dict) else a, inner, inner),
    )


SCHEMAS = st.recursive(LEAVES, compound, max_leaves=8)


def check(schema, random):
    """Sample the grammar: each text is valid."""
    validator = jsonschema_rs.Draft202012Validator(schema)
    with contextlib.suppress(BadRequest):
        sampler = Sampler(compile_schema(schema, "schema"))
        texts = {sampler.sample(random) for _ in range(8)} - {None}
        for text in texts:
            assert validator.is_valid(json.loads(text)), text


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_whatever_the_grammar_of_a_schema_admits_is_valid(schema, random):
    check(schema, random)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_whatever_the_grammar_of_a_schema_admits_is_valid_at_length(schema, random):
    check(schema, random)


# The other way round: instances drawn at random that the schema forbids are not admitted.
JSON = st.recursive(
    CONSTANTS | NUMBERS | st.text("ab1-", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.lists(JSON, min_size=5, max_size=5))
def test_what_a_schema_forbids_is_not_admitted(schema, instances):
    validator = jsonschema_rs.Draft202012Validator(schema)
    with contextlib.suppress(BadRequest):
        recogniser = Recogniser(compile_schema(schema, "schema"))
        for instance in instances:
            assert validator.is_valid(instance) or not recogniser.admits(json.dumps(instance)), instance
