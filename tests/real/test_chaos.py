"""A minute of chaos: three real nodes and the client under mixed load and faults on a seeded schedule."""

import asyncio
import itertools

import pytest

from benchmarks.chaos.run import run
from benchmarks.chaos.schedule import RECOVERY_S, schedule


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_one_schedule_in_which_no_node_has_two_faults_at_once(seed):
    faults = schedule(seed, 180)
    assert faults == schedule(seed, 180)
    assert faults != schedule(seed + 1, 180)
    for node in range(3):
        own = [fault for fault in faults if fault.node == node]
        assert all(later.at >= earlier.until + RECOVERY_S for earlier, later in itertools.pairwise(own))
    assert all(fault.until <= 180 - RECOVERY_S for fault in faults)


# Three nodes with three engines each are started, loaded for a minute, and looked at afterwards.
@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_invariant_is_violated_in_a_minute_of_chaos(store, tmp_path):
    report = asyncio.run(run(20261121, 60, tmp_path, store, rate=4))
    print(report)
    assert not report.violations, str(report)
