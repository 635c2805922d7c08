"""Only a refusal of the row itself rejects it; all other failures are waited out, or leave it unanswered."""

import pytest

from backend_client.bulk.answers import Patience, Unanswered
from backend_client.errors import (
    CloudRejected,
    FleetOverloaded,
    ModelNotFound,
    NPUUnavailableError,
    RequestRejected,
)


class Fleet:
    """`errors` maps rows to what a request with them raises; the first `away` requests, probes too, raise `error`."""

    def __init__(self, errors=None, away=0, error=None):
        self.errors = errors or {}
        self.away = away
        self.error = error or NPUUnavailableError("away")
        self.now = 0.0
        self.served, self.refused, self.requests, self.probes = [], {}, 0, 0
        self.in_each_pause = None

    async def sleep(self, seconds):
        self.now += seconds
        if self.in_each_pause is not None:
            await self.in_each_pause()

    async def probe(self):
        self.probes += 1
        self._fail_while_away()

    def _fail_while_away(self):
        if self.away:
            self.away -= 1
            raise self.error

    async def serve(self, rows):
        self.requests += 1
        self._fail_while_away()
        for row in rows:
            if row in self.errors:
                raise self.errors[row]
        self.served += rows

    def patience(self, limit=600.0):
        return Patience(limit, 3, self.probe, clock=lambda: self.now, sleep=self.sleep)

    async def run(self, rows, limit=600.0):
        await self.send(self.patience(limit), rows)

    async def send(self, patience, rows):
        self.refused |= await patience.serve(rows, self.serve)


@pytest.mark.parametrize(
    "error",
    [
        NPUUnavailableError("away"),
        FleetOverloaded("busy"),
        ModelNotFound("no node has it"),
        CloudRejected("the cloud rejected it", status=400),
        RequestRejected("an old node has no such URL", status=404, code="not_found"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_no_row_is_refused_for_what_is_not_about_it(error):
    fleet = Fleet(away=30, error=error)
    await fleet.run(range(64))
    assert (fleet.refused, fleet.served) == ({}, [*range(64)])


async def test_a_fleet_that_stays_away_ends_the_run():
    fleet = Fleet(away=10**9)
    with pytest.raises(NPUUnavailableError):
        await fleet.run([1], limit=60.0)
    assert 60 < fleet.now < 120
    assert fleet.refused == {}


async def test_a_row_that_fails_while_probes_are_answered_is_reported_and_not_refused():
    """However short the patience is: this needs no clock."""
    fleet = Fleet({1: NPUUnavailableError("it takes down the proxy")})
    with pytest.raises(Unanswered, match="it takes down the proxy"):
        await fleet.run([1], limit=0.0)
    assert (fleet.requests, fleet.probes, fleet.refused) == (3, 3, {})


async def test_an_answer_to_other_rows_since_the_failure_saves_the_probe():
    fleet = Fleet({1: NPUUnavailableError("it takes down the proxy")})
    patience = fleet.patience()
    fleet.in_each_pause = lambda: fleet.send(patience, [2])
    with pytest.raises(Unanswered):
        await fleet.send(patience, [1])
    assert (fleet.served, fleet.probes) == ([2, 2, 2], 0)


async def test_a_row_is_sent_once_while_the_fleet_is_down_for_hours():
    fleet = Fleet(away=1000)
    await fleet.run([1], limit=10**6)
    assert (fleet.requests, fleet.probes, fleet.served) == (2, 1000, [1])


async def test_a_row_that_waits_behind_others_on_a_busy_fleet_waits_on():
    fleet = Fleet({1: FleetOverloaded("busy")})
    patience = fleet.patience(limit=60.0)

    async def another():
        if fleet.now > 10_000:
            del fleet.errors[1]
        await fleet.send(patience, [2])

    fleet.in_each_pause = another
    await fleet.send(patience, [1])
    assert fleet.now > 10_000
    assert 1 in fleet.served


async def test_a_row_for_which_a_fleet_has_never_room_is_reported_after_the_patience():
    fleet = Fleet({1: FleetOverloaded("busy")})
    with pytest.raises(Unanswered, match="busy"):
        await fleet.run([1], limit=60.0)
    assert 60 < fleet.now < 120
