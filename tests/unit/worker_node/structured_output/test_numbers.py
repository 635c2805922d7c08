"""Bounds of numbers are exact whatever their size: loosening may clamp, tightening is enforced or refused by name."""

import json
import random
from fractions import Fraction

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.recogniser import Recogniser
from tests.unit.worker_node.structured_output.sampler import Sampler
from worker_node.core.errors import BadRequest
from worker_node.structured_output.schema import compile_schema

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LARGE = [10**15, 10**15 + 1, 2**53, 10**16 - 1, 10**17, 2**63 - 1, 2**64, 1e17, 1e22, 1.5e60, 10**40 + 7]


def samples(schema, count=6):
    sampler = Sampler(compile_schema(schema, "schema"))
    return [sampler.sample(random.Random(seed)) for seed in range(count)]


def holds(keyword, number, bound):
    """The keyword's condition, computed exactly."""
    number, bound = Fraction(number), Fraction(json.dumps(bound))
    return {
        "minimum": number >= bound,
        "maximum": number <= bound,
        "exclusiveMinimum": number > bound,
        "exclusiveMaximum": number < bound,
    }[keyword]


LOWS = st.integers(-300, 300) | st.sampled_from([10**15 - 1, 10**17 + 3, -(10**20)])


@given(LOWS, st.integers(0, 400) | st.just(1200), st.integers(-800, 1300))
def test_the_digits_of_a_range_are_the_numbers_in_it(low, width, offset):
    held = Recogniser(compile_schema({"type": "integer", "minimum": low, "maximum": low + width}, "schema"))
    for number in (low, low + width, low - 1, low + width + 1, low + offset, low * 10, low // 10, 0):
        assert held.admits(str(number)) == (low <= number <= low + width)


@pytest.mark.parametrize(
    ("step", "bounds"),
    [(step, {"minimum": 0}) for step in (2, 5, 10, 0.5, 0.125)]
    + [(step, {"minimum": 0, "maximum": 41 * step}) for step in (7, 30, 64, 1.5, 0.01)],
)
def test_the_multiples_of_a_step_are_admitted_and_no_others(step, bounds):
    held = Recogniser(compile_schema({"type": "number", "multipleOf": step} | bounds, "schema"))
    exact = Fraction(json.dumps(step))
    decimals = next(n for n in range(9) if (exact * 10**n).denominator == 1)
    for units in range(int(exact * 10**decimals) * 40 + 1):
        text = str(units).zfill(decimals + 1)
        text = text[: len(text) - decimals] + ("." + text[-decimals:] if decimals else "")
        assert held.admits(text) == ((Fraction(units, 10**decimals) / exact).denominator == 1), text


# Where a text that is read as a double would round onto the bound itself.
@pytest.mark.parametrize("bound", [9_999_999_999.0, 123456789.1235, 0.30000000000000004, -4503599627.5])
@pytest.mark.parametrize("keyword", ["exclusiveMinimum", "exclusiveMaximum"])
def test_a_decimal_keeps_to_an_exclusive_bound_when_it_is_read_as_a_double(keyword, bound):
    grammar = compile_schema({"type": "number", keyword: bound}, "schema")
    held, validator = Recogniser(grammar), jsonschema_rs.Draft202012Validator({keyword: bound})
    exact, texts = Fraction(bound), []
    for decimals in range(7):
        nearest = int(exact * 10**decimals)
        for number in range(nearest - 3, nearest + 4):
            digits = str(abs(number)).zfill(decimals + 1)
            whole = digits[: len(digits) - decimals] + ("." + digits[-decimals:] if decimals else "")
            texts.append("-" * (number < 0) + whole)
    wrong = [text for text in texts if held.admits(text) and not validator.is_valid(json.loads(text))]
    assert wrong == []


EXTREMES = st.one_of(
    st.sampled_from([0, 0.0, -1, 1e308, -1e308, 5e-324, 1e-300, 1e-12, 0.1, 0.25, 1.5, 3, 7, 100, *LARGE]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(),
)


@given(
    schema=st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])}, optional=dict.fromkeys([*BOUNDS, "multipleOf"], EXTREMES)
    )
)
@example({"type": "integer", "multipleOf": 0})
@example({"type": "number", "minimum": 1e308, "multipleOf": 1e-300})
@example({"type": "number", "multipleOf": 1e308})
@example({"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.25})
def test_numbers_of_any_size_are_valid_or_refused_by_name(schema):
    texts, refused = [], "schema"
    try:
        texts = samples(schema, 4)
    except BadRequest as refusal:
        refused = refusal.param
    assert refused in {"schema", *(f"schema.{keyword}" for keyword in schema)}
    for text in texts:
        exact = Fraction(text)
        assert all(holds(keyword, exact, schema[keyword]) for keyword in BOUNDS if keyword in schema), text
        step = Fraction(json.dumps(schema.get("multipleOf", 0)))
        assert not step or (exact / step).denominator == 1, text
        assert schema["type"] == "number" or exact.denominator == 1
