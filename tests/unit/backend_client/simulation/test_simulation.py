"""A short run of the simulation, and proof that it sees what it is there to see.

`make test` runs 15 scenarios, --long 100. A longer run:
python -m tests.unit.backend_client.simulation --seeds 0:10000 --jobs 4
"""

from collections import Counter
from unittest import mock

import pytest

from backend_client.fleet.pool import Pool
from backend_client.fleet.runtime import Prober
from backend_client.lifetime import OpenCalls
from backend_client.routing.call import Dispatcher, RetryBudget
from tests.unit.backend_client.simulation.run import simulate
from tests.unit.backend_client.simulation.scenario import FAULTS, draw

SEEDS = range(40)


def violations(seeds):
    return [f"seed {seed}: {violation}" for seed in seeds for violation in simulate(seed).violations]


def test_no_invariant_is_violated(long):
    assert not violations(range(100 if long else 15)), (
        "rerun with python -m tests.unit.backend_client.simulation --seeds SEED"
    )


def test_a_seed_repeats_exactly():
    for seed in (11, 12, 13):
        assert simulate(seed).ends == simulate(seed).ends


def test_the_scenarios_draw_every_fault_and_most_calls_are_answered():
    kinds = Counter(fault.kind for seed in range(300) for fault in draw(seed).faults)
    assert kinds.keys() == FAULTS.keys()
    ends = sum((simulate(seed).ends for seed in range(15)), Counter())
    assert ends["ok"] > ends.total() / 2
    assert len(ends) >= 5


async def _nothing():
    pass


# What is broken, how, and seeds that show it.
BREAKS = {
    "no traffic to a healthy node": (Pool, "probe_passed", lambda *_: None, SEEDS),
    "an unbounded retry budget": (RetryBudget, "withdraw", lambda _: True, [57, 112, 175, 220]),
    "a call that waits for no restart": (Dispatcher, "later", lambda *_: False, [99, 102, 152]),
    "calls that survive closing": (OpenCalls, "close", lambda _: _nothing(), SEEDS),
    "a probe task that is left": (Prober, "close", lambda _: _nothing(), SEEDS),
    "a lease that is never returned": (Pool, "settle", lambda *_: None, SEEDS),
}


@pytest.mark.parametrize("what", BREAKS)
def test_the_simulation_notices_each_broken_mechanism(what):
    owner, name, broken, seeds = BREAKS[what]
    with mock.patch.object(owner, name, broken):
        assert any(simulate(seed).violations for seed in seeds)
