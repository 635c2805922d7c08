"""What a schema's grammar admits is valid against the schema; what cannot be enforced is refused by name."""

import contextlib
import json

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.held_text import HeldText
from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.grammars.ebnf import Rules
from worker_node.grammars.pattern import PatternRefused, pattern_to_ebnf
from worker_node.grammars.schema import compile_schema


@pytest.fixture(scope="module")
def held(store, tmp_path_factory):
    return HeldText(store.get("smollm2-135m-instruct").path, tmp_path_factory.mktemp("constant"))


def check(held, schema, count=8):
    """Sample the schema's grammar: every text that ends is JSON and valid, and some do end."""
    grammar = compile_schema(schema, "schema")
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    texts = [held.sample(grammar, seed) for seed in range(count)]
    for text in texts:
        if text is not None:
            validator.validate(json.loads(text))
    return texts


def objects(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


NODE = objects(value={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})

NULL = {"type": "null"}

HELD = [
    True,
    {},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string"},
    {"type": "array"},
    {"type": "object"},
    {"type": ["integer", "null"]},
    {"enum": ["red", 'gr"een', 1, None, {"a": [1]}]},
    {"type": "string", "enum": ["a", 1]},
    {"const": {"a": 1}},
    {"type": "integer", "minimum": 5, "maximum": 7},
    {"type": "integer", "minimum": -1234, "exclusiveMaximum": 56},
    {"type": "integer", "exclusiveMinimum": 3},
    {"type": "integer", "maximum": -3},
    {"type": "integer", "minimum": 0.5, "maximum": 3.5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 0.5, "maximum": 0.9},
    {"type": "number", "minimum": -2.5},
    {"type": "number", "maximum": -0.125},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "maxLength": 100_000},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    {"type": "string", "pattern": '^\\d{2}\\w(a"|[^a]|.)$'},
    {"type": "string", "pattern": "b+"},
    *[{"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "email", "uri")],
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "telephone"},
    objects(a={"type": "string"}, b={"type": "integer"}),
    {"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "required": ["b"]},
    {"type": "object", "properties": {"a": NULL, "b": NULL}},
    {"type": "object", "required": ["undeclared"]},
    {"type": "object", "properties": {'a b"c\\': {"type": "null"}}, "required": ['a b"c\\']},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "additionalProperties": False},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    {"type": "array", "minItems": 2},
    {"type": "array", "items": False},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": NULL, "minItems": 3},
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}], "minimum": 3},
    {"allOf": [{"type": "integer"}, {"minimum": 100}, {"maximum": 200, "minimum": 150}]},
    {"allOf": [objects(a={"type": "null"}), objects(b={"type": "null"})]},
    {"oneOf": [objects(kind={"const": "a"}, x={"type": "null"}), objects(kind={"enum": ["b", "c"]})]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    objects(list={"$ref": "#/$defs/node"}) | {"$defs": {"node": NODE}},
    {"$ref": "#/$defs/small", "minimum": 5, "$defs": {"small": {"type": "integer", "maximum": 9}}},
    {"$ref": "#/definitions/a%20b", "definitions": {"a b": {"type": "null"}}},
    *[{"type": "string", "format": name} for name in ("ipv6", "duration", "json-pointer", "uri-reference")],
    {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "minProperties": 1},
    {"type": "object", "properties": {"ab": NULL}, "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,3}$"}, "additionalProperties": NULL, "minProperties": 1},
    {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 5}]},
    {"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "dependentRequired": {"a": ["c"]}},
    objects(kind={"enum": ["a", "b"]}, x={"type": "integer"})
    | {"if": {"properties": {"kind": {"const": "a"}}}, "then": {"properties": {"x": {"maximum": 5}}},
       "else": {"properties": {"x": {"minimum": 9}}}},
    {"$ref": "#small", "$defs": {"n": {"$defs": {"m": {"$anchor": "small", "type": "null"}}}}},
    *[{"type": "integer", "multipleOf": step} for step in (2, 7, 100)],
    {"type": "number", "multipleOf": 0.01},
    *[{"type": "number", "multipleOf": step} for step in (0.5, 0.25)],
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 5},
    {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0},
    {"type": "number", "multipleOf": 1.5, "exclusiveMinimum": -3, "maximum": 3},
    {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    {"items": {"enum": [1, 2, 3]}, "contains": {"const": 2}, "maxContains": 1, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
    {"type": "string", "not": {"enum": ["no", "never"]}, "maxLength": 4},
    {"not": {"type": ["object", "array", "string"]}},
    {"type": "string", "pattern": "^[a-z]", "minLength": 3, "maxLength": 6},
]  # fmt: skip


@pytest.mark.parametrize("schema", HELD, ids=json.dumps)
def test_what_is_written_is_valid(held, schema):
    assert any(text is not None for text in check(held, schema))


def test_a_schema_of_any_object_gives_json_objects(held):
    texts = [held.sample(compile_schema({"type": "object"}, "schema"), seed) for seed in range(10)]
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)


INTEGERS = st.integers(-2000, 2000)
FEW = st.integers(0, 3)
CONSTANTS = st.none() | st.text(max_size=4) | INTEGERS
SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, INTEGERS, INTEGERS),
    st.builds(lambda a, b: {"type": "number", "minimum": min(a, b) / 8, "maximum": max(a, b) / 8}, INTEGERS, INTEGERS),
    st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, FEW, FEW),
    st.builds(lambda values: {"enum": values}, st.lists(CONSTANTS, min_size=1, max_size=3)),
)


def compound(inner):
    names = st.text(max_size=4)
    return st.one_of(
        st.builds(
            lambda parts, needed: {
                "type": "object",
                "properties": parts,
                "required": [k for k in parts if k in needed],
            },
            st.dictionaries(names, inner, max_size=3),
            st.sets(names),
        ),
        st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 2)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.recursive(SCALARS, compound, max_leaves=5))
def test_any_schema_of_what_can_be_held_to(held, schema):
    check(held, schema, count=2)


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "array", "uniqueItems": True}, "schema.uniqueItems"),
        ({"type": "array", "prefixItems": [{}], "contains": {"type": "null"}}, "schema.contains"),
        ({"type": "integer", "multipleOf": 7, "minimum": 1000}, "schema.multipleOf"),
        ({"type": "number", "multipleOf": 0.3}, "schema.multipleOf"),
        ({"type": "string", "pattern": "^(?<=a)b"}, "schema.pattern"),
        ({"type": "string", "format": "regex"}, "schema.format"),
        ({"type": "string", "format": "date", "minLength": 3}, "schema.format"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "schema.oneOf"),
        ({"type": "object", "patternProperties": {"(?<!x)": {}}}, "schema.patternProperties"),
        ({"type": "object", "propertyNames": {"format": "date"}}, "schema.propertyNames"),
        (
            {"type": "object", "properties": {"a": {"not": {"pattern": "x"}}}, "required": ["a"]},
            "schema.properties.a.not",
        ),
        ({"$ref": "https://example.com/schema"}, "schema.$ref"),
        ({"if": {"pattern": "a"}, "then": False}, "schema.if"),
        ({"type": "object", "minProperties": 2}, "schema.minProperties"),
        ({"enum": [[1]], "minItems": 3}, "schema.minItems"),
        (
            {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}, "b": {"$dynamicAnchor": "a"}}},
            "schema.$dynamicRef",
        ),
        ({"allOf": [{"format": "date"}, {"format": "uuid"}]}, "schema"),
        (
            {"properties": {"a": {}}, "if": {"required": ["a"]}, "then": {}, "unevaluatedProperties": False},
            "schema.unevaluatedProperties",
        ),
        (False, "schema"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema, part):
    with pytest.raises((UnsupportedParameter, BadRequest)) as refusal:
        compile_schema(schema, "schema")
    assert refusal.value.param == part
    assert part in refusal.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "blah"},
        {"type": []},
        {"enum": []},
        {"properties": 5},
        {"required": "a"},
        {"minLength": -1},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "const": 5},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        "not a schema",
        5,
    ],
    ids=json.dumps,
)
def test_what_is_no_schema_or_admits_nothing_is_refused(schema):
    with pytest.raises(BadRequest):
        compile_schema(schema, "schema")


KEYWORDS = ["type", "properties", "items", "$ref", "anyOf", "allOf", "oneOf", "enum", "const", "minimum", "pattern"]
JSON = st.recursive(
    CONSTANTS | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_whatever_is_sent_is_compiled_or_refused(schema):
    try:
        compile_schema(schema, "schema")
    except BadRequest as refusal:
        where = refusal.param
    else:
        where = "schema"
    assert where.startswith("schema")


def test_a_schema_may_be_deep_but_not_without_end():
    deep = {"type": "null"}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    with pytest.raises(UnsupportedParameter):
        compile_schema(deep, "schema")


REFUSED = [
    "(",
    "a)",
    "[",
    "[]",
    "a{2",
    "a{3,2}",
    "a**",
    "(?<x>a)",
    "a\\b",
    "\\1",
    "a{1,1000000}",
    "(a{1,100}){1,100}b{300}",
]


@pytest.mark.parametrize("pattern", REFUSED)
def test_expressions_that_are_refused(pattern):
    with pytest.raises(PatternRefused):
        pattern_to_ebnf(pattern, Rules())


@given(st.text("ab[](){}|^$.*+?\\d-,1", max_size=12))
def test_any_expression_is_turned_into_a_grammar_or_refused(pattern):
    with contextlib.suppress(PatternRefused):
        pattern_to_ebnf(pattern, Rules())


@pytest.mark.parametrize("name", ["\x7f0", "\x7fg", "\x00ff", "\u200b7", "a\x80beef", "¡0", "é1é2"])
def test_a_code_is_not_read_on_into_the_digits_after_it(held, name):
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"}},
        "required": [name],
        "additionalProperties": False,
    }
    check(held, schema)
