"""Random small schemas, enforced by the runtime that the engines use: no answer is outside its schema.

The judges of `test_judge.py` read the grammar as it is meant. The runtime minimises each rule, and mixes up
alternatives that begin and end alike: as flat lists one in eight of these enumerations let another text pass.
"""

import json
import random

import jsonschema_rs
import pytest

from tests.support.held_text import HeldText
from worker_node.structured_output.schema import compile_schema

pytestmark = [pytest.mark.slow, pytest.mark.real]
SCHEMAS, SAMPLES = 60, 20


@pytest.fixture(scope="module")
def held(store, tmp_path_factory):
    return HeldText(store.get("smollm2-135m-instruct").path, tmp_path_factory.mktemp("constant"))


def words(rng, most, longest=4):
    return sorted({"".join(rng.choice("ab.") for _ in range(rng.randint(1, longest))) for _ in range(most)})


def enumeration(rng):
    return {"enum": words(rng, rng.randint(2, 7))}


def constants(rng):
    of_numbers = [{"const": rng.randint(-150, 150) / rng.choice((1, 2, 10, 100))} for _ in range(4)]
    return {"anyOf": [{"const": word} for word in words(rng, 4)] + [{"type": "null"}, *of_numbers]}


def multiple(rng):
    low, high = sorted(rng.sample(range(-30, 30), 2))
    step = rng.choice((2, 3, 5, 7, 0.5, 0.25, 1.5))
    bounds = {"minimum": low, "maximum": max(high, low + 8), "multipleOf": step}
    return {"type": "integer" if isinstance(step, int) else "number", **bounds}


def members(rng):
    values = ({"type": "boolean"}, {"const": 1}, {"enum": ["x", "y"]}, {"type": "null"})
    keys = words(rng, 5)
    properties = {key: rng.choice(values) for key in keys}
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": keys[:2]}


def pattern(rng):
    def expression(depth=0):
        kind = rng.random()
        if depth > 2 or kind < 0.45:
            return rng.choice(("a", "b", r"\.", "[ab]", "[bc]", "[0-9]", "ab", r"b\."))
        if kind < 0.7:
            return "(" + "|".join(expression(depth + 1) for _ in range(rng.randint(2, 4))) + ")"
        if kind < 0.8:
            return f"({expression(depth + 1)})" + rng.choice(("?", "{1,2}", "+"))
        return expression(depth + 1) + expression(depth + 1)

    return {"type": "string", "pattern": f"^{expression()}{expression()}$"}


@pytest.mark.parametrize("make", [enumeration, constants, multiple, members, pattern])
def test_the_runtime_admits_nothing_else(make, held, long):
    rng = random.Random(1)
    for _ in range(SCHEMAS * (10 if long else 1)):
        schema = make(rng)
        grammar = compile_schema(schema, "schema")
        for text in {held.sample(grammar, seed) for seed in range(SAMPLES)} - {None}:
            assert jsonschema_rs.is_valid(schema, json.loads(text)), (schema, text)
