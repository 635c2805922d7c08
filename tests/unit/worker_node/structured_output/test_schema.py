"""What a schema's grammar admits is valid against the schema; what cannot be enforced is refused by name."""

import json

import jsonschema_rs
import pytest

from tests.support.held_text import HeldText
from tests.support.recogniser import Recogniser
from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.structured_output.form import Compiled, compile_form
from worker_node.structured_output.schema import compile_schema


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
    {"type": ["integer", "null"]},
    {"enum": ["red", 'gr"een', 1, None, {"a": [1]}]},
    {"type": "string", "enum": ["a", 1]},
    {"type": "integer", "minimum": -1234, "exclusiveMaximum": 56},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "maxLength": 100_000},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    {"type": "string", "pattern": '^\\d{2}\\w(a"|[^a]|.)$'},
    *[{"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "email", "uri")],
    *[{"type": "string", "format": name} for name in ("ipv6", "duration", "uri-reference", "hostname", "telephone")],
    {"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "required": ["b"]},
    {"type": "object", "properties": {'a b"c\\': {"type": "null"}}, "required": ['a b"c\\']},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": NULL, "minItems": 3},
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}], "minimum": 3},
    {"allOf": [{"type": "integer"}, {"minimum": 100}, {"maximum": 200, "minimum": 150}]},
    {"oneOf": [objects(kind={"const": "a"}, x={"type": "null"}), objects(kind={"enum": ["b", "c"]})]},
    objects(list={"$ref": "#/$defs/node"}) | {"$defs": {"node": NODE}},
    {"$ref": "#/$defs/small", "minimum": 5, "$defs": {"small": {"type": "integer", "maximum": 9}}},
    {"$ref": "#/definitions/a%20b", "definitions": {"a b": {"type": "null"}}},
    {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "minProperties": 1},
    {"type": "object", "properties": {"ab": NULL}, "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,3}$"}, "additionalProperties": NULL, "minProperties": 1},
    {"type": "integer", "multipleOf": 5},
    {"type": "number", "multipleOf": 1.5, "exclusiveMinimum": -3, "maximum": 3},
    {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    {"type": "string", "pattern": "^[a-z]", "minLength": 3, "maxLength": 6},
    {"type": "string", "format": "date", "pattern": "^2024-"},
    {"type": "string", "format": "email", "pattern": "^[a-z]{2,5}@example\\.com$"},
    {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
    {"type": "object", "properties": {"a": NULL, "b": NULL}, "minProperties": 1},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": k}, k: NULL}, "required": [k]} for k in "xyz"]},
    {"allOf": [objects(a=NULL), {"properties": {"b": {"type": "integer"}}}], "unevaluatedProperties": False},
    {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "boolean"}},
    {"type": "integer", "multipleOf": 5, "minimum": -9007199254740991, "maximum": 9007199254740991},
    {"type": "object", "$id": "root", "properties": {"t": {"$id": "T", "type": "null"}, "u": {"$ref": "T"}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", HELD, ids=json.dumps)
def test_what_is_written_is_valid(held, schema):
    assert any(text is not None for text in check(held, schema))


# The keywords of a schema algebra, and others that cannot be enforced, by the place that a refusal names. What is
# admitted where the schema is not strict, and the keyword is dropped.
CANNOT = [
    ("not", '"a"', {"type": "string", "not": {"pattern": "a"}}),
    ("if", "null", {"type": "null", "if": {"pattern": "a"}}),
    ("dependentRequired", '{"a":null}', {"properties": {"a": NULL}, "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", "null", {"type": "null", "dependentSchemas": {"a": {}}}),
    ("unevaluatedItems", "[null]", {"prefixItems": [NULL], "unevaluatedItems": False}),
    ("contains", "[]", {"type": "array", "contains": NULL}),
    ("$dynamicRef", "null", {"type": "null", "$dynamicRef": "#a"}),
    ("oneOf", '"a"', {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}),
    ("oneOf", '{"a":null,"b":null}', {"oneOf": [objects(a=NULL), objects(a=NULL, b=NULL)]}),
    ("uniqueItems", "[1,1]", {"type": "array", "uniqueItems": True}),
    ("uniqueItems", "[1,1]", {"items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True}),
    ("propertyNames", '{"b":null}', {"propertyNames": {"pattern": "(?<=a)"}, "additionalProperties": NULL}),
    ("patternProperties", '{"a":1}', {"properties": {"a": {"const": 1}}, "patternProperties": {"a": {"minimum": 1}}}),
    ("patternProperties", "{}", {"type": "object", "patternProperties": {"^a": NULL, "^b": {"type": "integer"}}}),
    ("minLength", '"a"', {"enum": ["a", "bc"], "minLength": 2}),
    ("multipleOf", "1001", {"type": "integer", "multipleOf": 7, "minimum": 1000}),
    ("properties.n.multipleOf", '{"n":1}', objects(n={"type": "number", "multipleOf": 0.3})),
    ("pattern", '"a"', {"type": "string", "pattern": "(?<=b)b"}),
    ("format", '"("', {"type": "string", "format": "regex"}),
    ("format", '"a"', {"type": "string", "format": "email", "maxLength": 20}),
    ("patternProperties", "{}", {"type": "object", "patternProperties": {"(?<!x)": {}}}),
    ("minProperties", "{}", {"type": "object", "minProperties": 2}),
    ("minProperties", '{"a":null}', {"properties": {"a": NULL, "b": NULL}, "minProperties": 2}),
    ("maxProperties", '{"a":null,"b":null}', {"properties": {"a": NULL, "b": NULL}, "maxProperties": 1}),
    ("minItems", "[1]", {"enum": [[1]], "minItems": 3}),
    ("colour", "null", {"type": "null", "colour": "red"}),
]


@pytest.mark.parametrize(("place", "admitted", "schema"), CANNOT, ids=json.dumps)
def test_what_cannot_be_enforced_is_refused_by_name_or_dropped_and_listed(place, admitted, schema):
    with pytest.raises(UnsupportedParameter) as refusal:
        compile_form({"answer": {"schema": schema, "where": "s"}})
    assert refusal.value.param == f"s.{place}"
    assert f"s.{place}: " in refusal.value.message
    compiled = Compiled.read(compile_form({"answer": {"schema": schema, "where": "s", "strict": False}}))
    assert compiled.dropped == (f"s.{place}",)
    assert Recogniser(compiled.grammar).admits(admitted)


ONLY_HERE = r"\$ref: only a part of this schema"

# Choices that one value may match are held apart; what is admitted, and what the schema forbids.
APART = [
    (
        {"oneOf": [{"type": "object", "properties": {"kind": {"const": k}, "n": {"type": "integer"}}} for k in "ab"]},
        ['{"kind":"a"}', '{"kind":"b","n":1}'],
        ["{}", '{"n":1}', '{"kind":"c"}', "null"],
    ),
    (
        {"oneOf": [NULL, {"const": 1}, {"type": "string"}, objects(a={"const": 1}), objects(a={"const": 2}, b=NULL)]},
        ["null", "1", '"x"', '{"a":1}', '{"a":2,"b":null}'],
        ["2", "{}", '{"a":1,"b":null}'],
    ),
]


# An object that declares no properties has none, though its schema allows them.
CLOSED = ({"type": "object", "properties": {}}, ["{}"], ['{"value": 1}'])


@pytest.mark.parametrize(("schema", "admitted", "forbidden"), [*APART, CLOSED])
def test_objects_are_held_to_their_properties_and_choices_to_what_tells_them_apart(schema, admitted, forbidden):
    held, validator = Recogniser(compile_schema(schema, "schema")), jsonschema_rs.Draft202012Validator(schema)
    assert [text for text in admitted if not held.admits(text) or not validator.is_valid(json.loads(text))] == []
    assert [text for text in forbidden if held.admits(text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": [f"{i} is the number of a value" for i in range(10_000)]}, "bound here"),
        ({"$ref": "https://example.com/schema"}, ONLY_HERE),
        ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, ONLY_HERE),
        # Within an embedded schema a pointer begins there, and a name that two schemas have means neither.
        ({"properties": {"a": {"$id": "A", "properties": {"b": {"$ref": "#/properties/c"}}}}}, ONLY_HERE),
        ({"properties": {"a": {"$id": "A"}, "b": {"$id": "A"}, "c": {"$ref": "A"}}}, ONLY_HERE),
    ],
)
def test_bounds_and_references_that_could_mean_something_else_are_refused_even_if_not_strict(schema, message):
    with pytest.raises(UnsupportedParameter, match=message):
        compile_form({"answer": {"schema": schema, "where": "s", "strict": False}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "blah"},
        {"enum": []},
        {"properties": 5},
        {"minLength": -1},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "const": 5},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        "not a schema",
        # Definitions without an end, and numbers that are none.
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "minimum": 3}}},
        {"$ref": "#", "minimum": 3},
        {"allOf": [{"$ref": "#"}, {"type": "object"}]},
        {"anyOf": [{"$ref": "#"}], "minimum": 1},
        {"const": float("nan")},
        {"type": "integer", "minimum": float("inf")},
        {"$ref": "#/const", "minimum": 3, "const": 5},
    ],
    ids=json.dumps,
)
def test_what_is_no_schema_or_admits_nothing_is_refused(schema):
    with pytest.raises(BadRequest):
        compile_schema(schema, "schema")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"required": ["a"], "additionalProperties": False}, "schema.properties.a: false matches no value"),
        (
            {"properties": {"a": {"type": "string", "const": 5}}, "required": ["a"]},
            "schema.properties.a: no value matches",
        ),
        (
            {"properties": {"a": {"exclusiveMinimum": 0, "maximum": 1e-20}}, "required": ["a"]},
            "schema.properties.a: no number with 6 decimals",
        ),
        (
            {"minProperties": 2, "properties": {"a": {}}},
            "schema: minProperties asks for more properties than are declared",
        ),
        (
            {"minItems": 1, "items": {"format": "email", "maxLength": 3}},
            "schema.items: no text that can be written here",
        ),
        ({"propertyNames": {"maxLength": 1}, "required": ["ab"]}, "schema.properties.ab: propertyNames does not match"),
    ],
    ids=json.dumps,
)
def test_a_refusal_says_whether_no_value_matches_or_none_is_written(schema, message):
    with pytest.raises(BadRequest) as refused:
        compile_schema(schema, "schema")
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/a"}, "$defs": {"a": {"const": 1}}},
        {"type": "object"},
    ],
    ids=json.dumps,
)
def test_white_space_is_at_most_a_line_break_and_an_indentation(schema):
    held = Recogniser(compile_schema(schema, "schema"))
    assert held.admits('{"a":1}')
    assert held.admits('{\n  "a": 1\n}')
    assert not held.admits('{\n\n  "a": 1}')
    assert not held.admits('{"a": ' + " " * 17 + "1}")


@pytest.mark.parametrize("name", ["\x7f0", "\x7fg", "\x00ff", "a\x80beef", "é1é2"])
def test_a_code_is_not_read_on_into_the_digits_after_it(held, name):
    check(held, {"type": "object", "properties": {name: NULL}, "required": [name], "additionalProperties": False})
