"""Whose fault is a failure: the fleet's is waited out, a row's is narrowed down to it."""

import pytest

from backend_client.bulk.patience import Patience
from backend_client.errors import (
    AuthenticationFailed,
    FleetOverloaded,
    NPUUnavailableError,
    RequestRejected,
)


class Fleet:
    """`killers` are rows whose request no node survives; `away` answers so many requests with an error first."""

    def __init__(self, killers=(), away=0, error=NPUUnavailableError):
        self.killers = set(killers)
        self.away = away
        self.error = error
        self.now = 0.0
        self.served, self.refused, self.requests = [], {}, 0

    async def canary(self):
        if self.away:
            raise self.error("away")

    async def sleep(self, seconds):
        self.now += seconds

    async def serve(self, rows):
        self.requests += 1
        if self.away:
            self.away -= 1
            raise self.error("away")
        if self.killers & set(rows):
            raise NPUUnavailableError("the engine died")
        self.served += rows

    async def run(self, rows, limit=600.0):
        patience = Patience(self.canary, limit, clock=lambda: self.now, sleep=self.sleep)
        await patience.serve(rows, self.serve, self.refused.__setitem__)


async def test_rows_that_no_node_survives_are_found_and_all_others_served():
    fleet = Fleet(killers=[3, 17])
    await fleet.run(range(64))
    assert sorted(fleet.refused) == [3, 17]
    assert sorted(fleet.served) == sorted(set(range(64)) - {3, 17})


async def test_a_row_that_is_late_twice_on_a_busy_fleet_is_served():
    fleet = Fleet()
    late = 2

    async def serve(rows):
        nonlocal late
        if late:
            late -= 1
            raise NPUUnavailableError("late")
        fleet.served += rows

    fleet.serve = serve
    await fleet.run([5])
    assert (fleet.refused, fleet.served) == ({}, [5])


async def test_no_row_is_refused_while_the_whole_fleet_is_away():
    fleet = Fleet(away=30)
    await fleet.run(range(64))
    assert fleet.refused == {}
    assert sorted(fleet.served) == list(range(64))


async def test_overload_is_never_a_row_s_fault():
    fleet = Fleet(away=20, error=FleetOverloaded)

    async def canary():
        return None

    fleet.canary = canary
    await fleet.run([1])
    assert (fleet.refused, fleet.served) == ({}, [1])


async def test_a_fleet_that_stays_away_ends_the_run():
    fleet = Fleet(away=10**9)
    with pytest.raises(NPUUnavailableError):
        await fleet.run([1], limit=60.0)
    assert 60 < fleet.now < 120
    assert fleet.refused == {}


async def test_a_refused_key_ends_the_run_at_once():
    fleet = Fleet(away=10**9, error=AuthenticationFailed)
    with pytest.raises(AuthenticationFailed):
        await fleet.run(range(64))
    assert fleet.requests == 1


async def test_a_refusal_is_bisected_without_waiting():
    fleet = Fleet()

    async def serve(rows):
        fleet.requests += 1
        if 40 in rows:
            raise RequestRejected("node: no", node="node", code="invalid_request")
        fleet.served += rows

    fleet.serve = serve
    await fleet.run(range(64))
    assert fleet.refused == {40: "refused: no"}
    assert (fleet.now, fleet.requests) == (0.0, 13)
