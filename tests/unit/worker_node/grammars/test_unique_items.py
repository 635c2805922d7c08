"""Lists without repeats: every order of a few constants, and no list with a repeat."""

import itertools
import json

import pytest

from tests.support.recogniser import Recogniser
from worker_node.errors import UnsupportedParameter
from worker_node.grammars.schema import compile_schema


@pytest.mark.parametrize(("least", "most"), [(0, None), (1, 2), (2, None), (0, 9)])
@pytest.mark.parametrize(
    ("items", "values"),
    [
        ({"enum": ["a", "b", "c", "d"]}, ["a", "b", "c", "d"]),
        ({"anyOf": [{"const": "a"}, {"type": "boolean"}]}, ["a", True, False]),
        ({"type": "integer", "minimum": 0.5, "maximum": 3.5, "title": "n"}, [1, 2, 3]),
    ],
)
def test_few_constants_come_in_any_order(items, values, least, most):
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": least}
    held = Recogniser(compile_schema(schema | ({} if most is None else {"maxItems": most}), "schema"))
    for count in range(5):
        for chosen in itertools.product(values, repeat=count):
            wanted = len(set(chosen)) == count and least <= count <= (most or 9)
            assert held.admits(json.dumps(list(chosen))) == wanted, chosen


def test_more_constants_come_in_their_own_order():
    schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 40}, "uniqueItems": True}
    held = Recogniser(compile_schema(schema, "schema"))
    assert held.admits("[1, 7, 40]")
    assert not held.admits("[7, 7]")
    assert not held.admits("[7, 1]")


@pytest.mark.parametrize(
    "items",
    [
        {"type": "integer", "minimum": 1},
        {"type": "integer", "minimum": 1, "maximum": 65},
        {"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 2},
        {"type": "number", "minimum": 1, "maximum": 9},
    ],
)
def test_other_numbers_are_refused_by_name(items):
    with pytest.raises(UnsupportedParameter) as refused:
        compile_schema({"type": "array", "items": items, "uniqueItems": True}, "schema")
    assert refused.value.param == "schema.uniqueItems"
