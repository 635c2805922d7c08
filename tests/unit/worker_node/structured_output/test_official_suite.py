"""The official test suite of JSON Schema: no grammar admits an instance that its schema forbids."""

import functools

import pytest

from tests.support.schema_suite import groups, run

# Whether this many are enforced is a matter of coverage, not of correctness: fewer would be a step back.
ENFORCED = {".": 200, "optional": 26, "optional/format": 18}
ADMITTED = {".": 250, "optional": 20, "optional/format": 55}


@functools.cache
def outcomes_of(part):
    return [run(group) for group in groups(part)]


# A second of CPU time for the 368 groups; the first run on a machine fetches the package.
@pytest.mark.parametrize("part", ENFORCED)
def test_no_instance_is_admitted_that_the_schema_forbids(part):
    outcomes = outcomes_of(part)
    assert {one.group.name: one.forbidden for one in outcomes if one.forbidden} == {}
    enforced = [one for one in outcomes if one.refusal is None]
    assert len(enforced) >= ENFORCED[part]
    assert sum(one.admitted for one in enforced) >= ADMITTED[part]


@pytest.mark.parametrize("part", ENFORCED)
def test_what_is_rejected_names_the_part(part):
    outcomes = outcomes_of(part)
    assert all(one.param.startswith("schema") and one.param in one.refusal for one in outcomes if one.refusal)
