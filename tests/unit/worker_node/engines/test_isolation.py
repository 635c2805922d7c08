"""Which requests are suspected of an engine's death, and who may use an engine together."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import eventually
from worker_node.core.errors import DeadlineExceeded
from worker_node.encoders.jobs import row_job
from worker_node.engines.isolation import Isolation, Suspects, fingerprint
from worker_node.tasks.generate.messages import GenerateJob, Sampling

FAR = 1e12
A, B, C = b"a", b"b", b"c"


def test_an_answer_clears_a_suspect():
    suspects = Suspects()
    suspects.died({A: 1.0})
    suspects.answered(A)
    assert A not in suspects
    suspects.died({A: 1.0})
    assert not suspects.refuses(A)


def test_an_engine_that_kills_every_request_is_to_blame_in_the_end():
    suspects = Suspects()
    blamed = [suspects.died({bytes([key]): 1.0}) for key in range(20) for _ in range(2)]
    assert blamed[:16] == [False, True] * 8
    assert not any(blamed[16:])
    suspects.answered(b"another")
    suspects.died({A: 1.0})
    assert suspects.died({A: 1.0})


def test_suspects_are_forgotten_after_a_time_and_bounded():
    now = 0.0
    suspects = Suspects(clock=lambda: now, memory_s=10.0, capacity=2)
    suspects.died({A: 1.0})
    suspects.died({B: 1.0})
    suspects.died({C: 1.0})
    assert [key in suspects for key in (A, B, C)] == [False, True, True]
    now = 10.0
    assert [key in suspects for key in (B, C)] == [False, False]
    assert not suspects


def test_a_suspect_runs_alone_for_twice_as_long_as_it_ever_ran_when_an_engine_died():
    suspects = Suspects(alone_s=10.0)
    assert suspects.time_alone(A) == 0.0
    suspects.died({A: 3.0, B: 30.0})
    assert [suspects.time_alone(key) for key in (A, B)] == [10.0, 60.0]
    suspects.died({A: 8.0, B: 1.0})
    assert [suspects.time_alone(key) for key in (A, B)] == [16.0, 60.0]


def test_a_fingerprint_ignores_id_deadline_and_limits():
    def job(job_id=1, tokens=b"1234", **more):
        return GenerateJob(job_id, tokens, **({"max_new_tokens": 8, "deadline": 5.0} | more))

    same = [job(), job(2), job(max_new_tokens=9), job(deadline=7.0), job(interactive=False)]
    assert len({fingerprint(one) for one in same}) == 1
    others = [job(), job(tokens=b"4321"), job(grammar="root ::= x"), job(sampling=Sampling(temperature=0.5))]
    others += [row_job(rows, 0.0) for rows in ([[1]], [[1, 2]], [[1], [2]])]
    assert len({fingerprint(one) for one in others}) == len(others)


@given(count=st.integers(1, 12), poisonous=st.sets(st.integers(0, 11), max_size=3), data=st.data())
def test_every_poisonous_request_is_refused_and_no_other(count, poisonous, data):
    """Requests are sent together, then suspects alone in any order. The oracle is the poison itself."""
    suspects = Suspects()
    waiting = [bytes([n]) for n in range(count)]
    poison = {bytes([n]) for n in poisonous if n < count}
    answered, refused, deaths = set(), set(), 0
    while waiting:
        waiting = [key for key in waiting if not (suspects.refuses(key) and not refused.add(key))]
        suspected = [key for key in waiting if key in suspects]
        group = [data.draw(st.sampled_from(suspected))] if suspected else list(waiting)
        if poison & set(group):
            deaths += 1
            suspects.died(dict.fromkeys(group, 1.0))
            continue
        for key in group:
            suspects.answered(key)
            waiting.remove(key)
            answered.add(key)
    assert refused == poison
    assert answered == {bytes([n]) for n in range(count)} - poison
    assert deaths <= 1 + 2 * len(poison)


class Guest:
    """A request that uses the engine until `leave`."""

    def __init__(self, isolation, *, alone_s=0.0, deadline=FAR):
        self.inside = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._stay(isolation.use(deadline, alone_s=alone_s)))

    async def _stay(self, use):
        async with use:
            self.inside = True
            await self._leave.wait()
        self.inside = False

    async def leave(self):
        self._leave.set()
        await self.task
        await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def assert_free(isolation):
    async with asyncio.timeout(1), isolation.use(FAR, alone_s=FAR):
        pass


async def guests(isolation, *times_alone):
    made = [Guest(isolation, alone_s=each) for each in times_alone]
    await settle()
    return made


async def test_a_request_that_must_be_alone_waits_for_those_before_it_and_is_not_overtaken():
    isolation = Isolation()
    first, second, alone, later, last = made = await guests(isolation, 0, 0, FAR, 0, FAR)
    expected = [(first, second), (alone,), (later,), (last,)]
    for inside in expected:
        assert [guest for guest in made if guest.inside] == list(inside)
        for guest in inside:
            await guest.leave()
    await assert_free(isolation)


async def test_a_request_that_stops_waiting_lets_others_in():
    isolation = Isolation()
    (first,) = await guests(isolation, 0)
    alone = Guest(isolation, alone_s=FAR)
    late = Guest(isolation, alone_s=FAR, deadline=0.0)
    (shared,) = await guests(isolation, 0)
    with pytest.raises(DeadlineExceeded):
        await late.task
    assert not shared.inside
    alone.task.cancel()
    await settle()
    assert shared.inside
    await first.leave()
    await shared.leave()
    await assert_free(isolation)


async def test_a_request_is_alone_for_its_time_only():
    isolation = Isolation()
    alone, other, next_alone = await guests(isolation, 0.01, 0, FAR)
    await eventually(lambda: other.inside)
    assert alone.inside
    await other.leave()
    assert not next_alone.inside
    await alone.leave()
    assert next_alone.inside
    await next_alone.leave()
    await assert_free(isolation)


async def test_a_request_that_must_be_alone_keeps_others_out_no_longer_while_it_waits_than_it_would_alone():
    isolation = Isolation()
    long, alone, other = await guests(isolation, 0, 0.05, 0)
    assert not other.inside
    await eventually(lambda: other.inside)
    assert long.inside
    assert not alone.inside
    for guest in (other, long):
        await guest.leave()
    await eventually(lambda: alone.inside)
    await alone.leave()
    await assert_free(isolation)
