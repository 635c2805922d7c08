"""Who may be on an engine together."""

import asyncio

import pytest

from worker_node.core.errors import DeadlineExceeded
from worker_node.engines import isolation
from worker_node.engines.isolation import Isolation, Standing

FAR = 1e12
CLEAR, SUSPECT, PRIME = Standing.CLEAR, Standing.SUSPECT, Standing.PRIME


class Guest:
    """A request that is on the engine until it is told to leave."""

    def __init__(self, gate, standing, deadline=FAR, company=1):
        self.visit = None
        self._gate = gate
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._stay(gate, standing, deadline, company))

    async def _stay(self, gate, standing, deadline, company):
        async with gate.visit(standing, deadline, company) as self.visit:
            await self._leave.wait()

    @property
    def inside(self):
        return self.visit is not None and not self.task.done()

    async def leave(self):
        self._leave.set()
        await self.task
        await settle()

    def harmless(self):
        self._gate.harmless(self.visit)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def guests(gate, *standings):
    made = []
    for standing in standings:
        made.append(Guest(gate, standing))
        await settle()
    return made


async def test_clear_requests_share_the_engine():
    made = await guests(Isolation(), CLEAR, CLEAR, CLEAR)
    assert all(guest.inside for guest in made)
    for guest in made:
        await guest.leave()


async def test_suspects_are_tried_one_at_a_time_beside_those_that_are_harmless_and_clear_ones_wait():
    first, second, clear = made = await guests(Isolation(), SUSPECT, SUSPECT, CLEAR)
    assert [guest.inside for guest in made] == [True, False, False]
    first.harmless()
    await settle()
    assert [guest.inside for guest in made] == [True, True, False]
    second.harmless()
    await settle()
    assert clear.inside
    for guest in made:
        await guest.leave()


async def test_suspects_come_in_groups_and_those_that_are_suspected_more_come_last():
    gate = Isolation()
    made = [Guest(gate, SUSPECT, company=company) for company in (1, 3, 3, 3, 3, 2)]
    with gate.reserved(3):
        await settle()
        assert [guest.inside for guest in made] == [False, True, True, True, False, False]
    made[1].harmless()
    await settle()
    assert [guest.inside for guest in made] == [False, True, True, True, True, False]
    for guest in made[2:5]:
        guest.harmless()
    await settle()
    assert [guest.inside for guest in made] == [False, True, True, True, True, True]
    assert gate.trials_go_on
    made[5].harmless()
    await settle()
    assert made[0].inside
    made[0].harmless()
    assert not gate.trials_go_on
    for guest in made:
        await guest.leave()


async def test_a_group_waits_for_those_that_are_suspected_less_and_come_later():
    gate = Isolation()
    with gate.reserved(3):
        (single,) = await guests(gate, SUSPECT)
        assert not single.inside
    await settle()
    assert single.inside
    await single.leave()


async def test_the_prime_suspect_is_alone_and_waits_for_an_empty_engine():
    clear, prime, other = made = await guests(Isolation(), CLEAR, PRIME, CLEAR)
    assert [guest.inside for guest in made] == [True, False, True], "those who come are not kept out by it"
    await clear.leave()
    assert not prime.inside
    await other.leave()
    assert prime.inside
    (late,) = await guests(prime._gate, CLEAR)
    assert not late.inside
    await prime.leave()
    assert late.inside
    await late.leave()


async def test_the_prime_suspect_keeps_others_out_for_a_bounded_time_after_its_first_result(monkeypatch):
    monkeypatch.setattr(isolation, "_ALONE_S", 0.0)
    prime, clear = await guests(Isolation(), PRIME, CLEAR)
    assert not clear.inside
    prime.harmless()
    await asyncio.wait_for(_until(lambda: clear.inside), 5)
    await prime.leave()
    await clear.leave()


async def test_a_suspect_at_an_engine_in_use_is_run_with_the_others_in_the_end(monkeypatch):
    monkeypatch.setattr(isolation, "_PATIENCE_S", 0.0)
    clear, suspect = await guests(Isolation(), CLEAR, SUSPECT)
    await asyncio.wait_for(_until(lambda: suspect.inside), 5)
    assert not suspect.visit.apart
    await suspect.leave()
    await clear.leave()


async def test_clear_requests_let_a_suspect_that_waits_for_the_restart_go_first():
    gate = Isolation()
    restarted, leave = asyncio.Event(), asyncio.Event()

    async def run_again():
        with gate.reserved():
            await restarted.wait()
        async with gate.visit(SUSPECT, FAR):
            await leave.wait()

    suspect = asyncio.create_task(run_again())
    (clear,) = await guests(gate, CLEAR)
    assert not clear.inside
    restarted.set()
    await settle()
    assert not clear.inside
    leave.set()
    await suspect
    await settle()
    assert clear.inside
    await clear.leave()


async def test_giving_up_leaves_nothing_behind():
    gate = Isolation()
    (prime,) = await guests(gate, PRIME)
    late = Guest(gate, CLEAR, deadline=0.0)
    with pytest.raises(DeadlineExceeded):
        await late.task
    (cancelled,) = await guests(gate, SUSPECT)
    cancelled.task.cancel()
    await settle()
    await prime.leave()
    (clear,) = await guests(gate, CLEAR)
    assert clear.inside
    await clear.leave()


async def _until(condition):
    while not condition():
        await asyncio.sleep(0)
