"""A minute of chaos: three real nodes and the client under mixed load and faults on a seeded schedule."""

import asyncio

import pytest

from tests.chaos.run import run


# Three nodes with three engines each are started, loaded for a minute, and looked at afterwards.
@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_invariant_is_violated_in_a_minute_of_chaos(store, tmp_path):
    report = asyncio.run(run(20261121, 60, tmp_path, store, rate=4))
    print(report)
    assert not report.violations, str(report)
