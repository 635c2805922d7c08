"""Bounds on the cost of a schema: in steps, not in seconds, so that the tests say the same on every machine."""

import contextlib
import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recogniser import Recogniser
from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.structured_output.cost import MAX_STEPS, Budget
from worker_node.structured_output.schema import compile_schema


def texts(count, **bounds):
    """An object of so many required strings; each bound is a function of the index."""
    parts = {f"f{i}": {"type": "string"} | {name: value(i) for name, value in bounds.items()} for i in range(count)}
    return {"type": "object", "properties": parts, "required": list(parts)}


def text(most):
    return {"type": "string", "maxLength": most}


OVER_A_BOUND = {
    "every way to end a count": texts(15, maxLength=lambda i: 16 + i),
    "many exact lengths": texts(360, minLength=lambda i: 300 + i, maxLength=lambda i: 300 + i),
    "many alternatives with counts": {"anyOf": [text(67 + 4 * i) for i in range(60)]},
    "many optional members": {"type": "object", "properties": {f"f{i}": {"type": "integer"} for i in range(600)}},
    "a large enumeration": {"enum": [f"{i} is the number of a value" for i in range(10_000)]},
    "deep nesting": {"items": {"items": {"items": {}}}, "allOf": [{"$ref": "#"}, {"minItems": 1}]},
}


@pytest.mark.parametrize("name", OVER_A_BOUND)
def test_a_schema_over_a_bound_is_refused_with_the_bound_and_its_cost(name):
    with pytest.raises(UnsupportedParameter, match="bound here") as refusal:
        compile_schema(OVER_A_BOUND[name], "schema")
    assert refusal.value.param.startswith("schema")


@pytest.mark.parametrize("pattern", ["^.{1,60}.{1,60}$", "^([a-z]+ ?){1,20}$"])
def test_counts_between_which_a_text_can_be_split_in_many_ways_are_refused(pattern):
    with pytest.raises(UnsupportedParameter, match="pattern"):
        compile_schema({"type": "string", "pattern": pattern}, "schema")


@pytest.mark.parametrize("pattern", ["^(a{0,9}b?){5}$", "^(([a-z]+)+)+$", "^.?.?$", "^([a-z]+ ){1,20}x?[a-z]*$"])
def test_a_text_that_can_be_split_in_many_ways_is_read_by_an_automaton_where_that_is_small(pattern):
    held = Recogniser(compile_schema({"type": "string", "pattern": pattern}, "schema"))
    texts = ["", "a", "ab", "aaaaaaaaaab", "aaaaaaaaab" * 5, "ababababab", "a b cd", "a " * 20, "a " * 21, "A", "é."]
    for text in texts:
        assert held.admits(json.dumps(text, ensure_ascii=False)) == bool(re.search(pattern, text)), text


def test_many_texts_of_one_length_or_expression_share_their_rules():
    email = {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]*@([a-z-]+\.)+[a-z]{2,}$"}
    assert compile_schema(texts(100, maxLength=lambda _: 2000), "schema")
    assert compile_schema({"properties": {f"e{i}": email for i in range(20)}}, "schema")


def test_a_definition_may_be_used_in_itself_with_the_same_keywords_beside_it():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node", "minProperties": 0}}}
    assert compile_schema({"$ref": "#/$defs/node", "$defs": {"node": node}}, "schema")


def test_constants_that_only_look_equal_are_not_merged():
    with pytest.raises(BadRequest, match="no value"):
        compile_schema({"allOf": [{"const": 1}, {"const": True}]}, "schema")
    assert compile_schema({"allOf": [{"const": 1}, {"const": 1.0}]}, "schema")


GROWING = {
    "required": lambda n: {"type": "object", "required": [f"p{i}" for i in range(n)]},
    "allOf with properties": lambda n: {
        "allOf": [{"properties": {f"p{i}": {"type": "null"}}, "required": [f"p{i}"]} for i in range(n)]
    },
    "allOf with required": lambda n: {"allOf": [{"type": "object", "required": [f"p{i}"]} for i in range(n)]},
    "allOf on one property": lambda n: {"allOf": [{"properties": {"p": {"type": "null"}}}] * n},
    "allOf with enum": lambda n: {"allOf": [{"enum": list(range(10))}] * n},
    "anyOf": lambda n: {"anyOf": [{"type": "null", "title": str(i)} for i in range(n)]},
    "enum": lambda n: {"enum": [str(i) for i in range(n)]},
    "const": lambda n: {"const": list(range(n))},
    "prefixItems": lambda n: {"prefixItems": [{"type": "null"}] * n},
    "$defs": lambda n: {
        "$defs": {f"d{i}": {"type": "null"} for i in range(n)},
        "prefixItems": [{"$ref": f"#/$defs/d{i}"} for i in range(n)],
    },
    "type": lambda n: {"type": ["null"] * n},
    "a long name": lambda n: {"properties": {"p" * n: {"type": "null"}}},
    "a long pattern": lambda n: {"type": "string", "pattern": "a" * n},
}  # fmt: skip


@pytest.mark.parametrize("keyword", GROWING)
def test_the_steps_are_linear_in_each_keyword(keyword, long):
    steps = []
    for count in (10, 100, 1000, 10_000) if long else (10, 100, 1000):
        budget = Budget("schema", steps=10**9)
        # Some are over a bound of size: the steps until then count too.
        with contextlib.suppress(UnsupportedParameter):
            compile_schema(GROWING[keyword](count), "schema", budget)
        steps.append(budget.spent)
    for less, more in pairwise(steps[1:]):
        assert more <= 12 * less
    assert steps[-1] < MAX_STEPS


@pytest.mark.parametrize(("count", "fits"), [(100, True), (1000, False)])
def test_a_union_has_as_many_choices_as_there_are_steps_to_compare_them(count, fits):
    choices = [
        {
            "type": "object",
            "properties": {"k": {"const": i}, "text": {"type": "string", "maxLength": 2000}},
            "required": ["k"],
        }
        for i in range(count)
    ]
    with contextlib.nullcontext() if fits else pytest.raises(UnsupportedParameter, match="steps"):
        compile_schema({"oneOf": choices}, "schema")


def test_what_multiplies_in_the_translation_ends_at_the_bound_on_steps():
    wide = {"anyOf": [{"properties": {f"p{i}": {"type": "null"}}} for i in range(700)]}
    schema = wide | {"properties": {f"q{i}": {"type": "null"} for i in range(700)}}
    budget = Budget("schema")
    with pytest.raises(UnsupportedParameter, match="bound here"):
        compile_schema(schema, "schema", budget)
    assert budget.spent <= MAX_STEPS + 2000
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}", "minimum": i}] * 2, "maximum": 9} for i in range(60)}
    with pytest.raises(BadRequest):
        compile_schema({"$defs": doubling | {"d60": {"type": "integer"}}, "$ref": "#/$defs/d0"}, "schema", budget)


def both(one, other):
    return one | other if isinstance(one, dict) and isinstance(other, dict) else one


NAMES = st.sampled_from(["a", "b", "c"])
COUNTS = st.sampled_from([0, 1, 7, 16, 100, 255, 256, 2000, 10**9])
HOSTILE = st.recursive(
    st.one_of(
        st.sampled_from([True, False, {}, {"type": "null"}, {"type": "integer", "minimum": -5}, {"$ref": "#"}]),
        st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, COUNTS, COUNTS),
        st.builds(lambda p: {"type": "string", "pattern": p}, st.text("ab.[]*+?{1,9}()|", max_size=12)),
        st.builds(lambda n: {"$ref": f"#/properties/{n}"}, NAMES),
        st.builds(lambda n, low: {"$ref": f"#/properties/{n}", "minimum": low}, NAMES, COUNTS),
        st.builds(lambda n: {"enum": [f"value {i}" for i in range(n)]}, st.sampled_from([1, 50, 3000])),
    ),
    lambda inner: st.one_of(
        st.builds(lambda parts: {"type": "object", "properties": parts}, st.dictionaries(NAMES, inner, min_size=1)),
        st.builds(lambda item, a, b: {"items": item, "minItems": a, "maxItems": a + b}, inner, COUNTS, COUNTS),
        st.builds(
            lambda keyword, options, copies: {keyword: options * copies},
            st.sampled_from(["anyOf", "allOf", "oneOf", "prefixItems"]),
            st.lists(inner, min_size=1, max_size=3),
            st.sampled_from([1, 2, 40]),
        ),
        st.builds(both, inner, inner),
    ),
    max_leaves=12,
)  # fmt: skip


@given(HOSTILE)
def test_any_schema_is_refused_or_becomes_a_grammar_in_bounded_steps(schema):
    budget = Budget("schema")
    with contextlib.suppress(BadRequest):
        compile_schema(schema, "schema", budget)
    assert budget.spent <= MAX_STEPS + 10_000
