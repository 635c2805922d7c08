"""The official test suite of JSON Schema: no grammar admits an instance that its schema forbids."""

import json

import pytest

from tests.support.recogniser import Recogniser
from tests.unit.worker_node.structured_output.schema_suite import groups
from worker_node.core.errors import BadRequest
from worker_node.structured_output.schema import compile_schema

# Whether this many are enforced is a matter of coverage, not of correctness: fewer would be a step back.
ENFORCED = {".": 200, "optional": 26, "optional/format": 18}
ADMITTED = {".": 250, "optional": 20, "optional/format": 55}


# A second of CPU time for the 368 groups; the first run on a machine fetches the package.
@pytest.mark.parametrize("part", ENFORCED)
def test_what_a_schema_forbids_is_not_admitted_and_a_refusal_names_the_part(part):
    enforced, admitted, refusals = 0, 0, []
    for name, schema, tests in groups(part):
        try:
            grammar = Recogniser(compile_schema(schema, "schema"))
        except BadRequest as refusal:
            refusals.append((refusal.param, refusal.message))
            continue
        enforced += 1
        for test in tests:
            forms = ({}, {"indent": 1}, {"ensure_ascii": False, "separators": (",", ":")})
            found = any(grammar.admits(json.dumps(test["data"], **form)) for form in forms)
            assert test["valid"] or not found, (name, test)
            admitted += found
    assert enforced >= ENFORCED[part]
    assert admitted >= ADMITTED[part]
    assert all(param.startswith("schema") and param in message for param, message in refusals)
