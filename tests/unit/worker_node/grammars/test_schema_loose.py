"""What a schema that is not strict gives up, and what it does not."""

import pytest

from tests.support.recogniser import Recogniser
from worker_node.errors import UnsupportedParameter
from worker_node.grammars.form import Compiled, compile_form
from worker_node.grammars.schema import compile_schema

LOOSE = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "s.uniqueItems", "[1,1]"),
    "an unknown keyword": ({"type": "null", "colour": "red"}, "s.colour", "null"),
    "a pattern with look-behind": ({"type": "string", "pattern": "(?<=b)b"}, "s.pattern", '"a"'),
    "not": ({"type": "string", "not": {"pattern": "a"}}, "s.not", '"a"'),
    "overlapping oneOf": ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "s.oneOf", '"a"'),
    "a part": ({"properties": {"n": {"type": "number", "multipleOf": 0.3}}}, "s.properties.n.multipleOf", '{"n":1}'),
}


@pytest.mark.parametrize("name", LOOSE)
def test_what_cannot_be_enforced_is_dropped_and_listed_where_a_schema_is_not_strict(name):
    schema, place, admitted = LOOSE[name]
    compiled = Compiled.read(compile_form({"answer": {"schema": schema, "where": "s", "strict": False}}))
    assert compiled.dropped == (place,)
    assert Recogniser(compiled.grammar).admits(admitted)
    with pytest.raises(UnsupportedParameter) as refusal:
        compile_form({"answer": {"schema": schema, "where": "s"}})
    assert refusal.value.param == place


def test_bounds_hold_where_a_schema_is_not_strict():
    large = {"enum": [f"value number {i}" for i in range(10_000)]}
    with pytest.raises(UnsupportedParameter, match="bound here"):
        compile_form({"answer": {"schema": large, "where": "s", "strict": False}})


def test_an_object_that_declares_no_properties_has_none():
    recogniser = Recogniser(compile_schema({"type": "object", "properties": {}}, "schema"))
    assert recogniser.admits("{}")
    assert not recogniser.admits('{"value": 1}')
