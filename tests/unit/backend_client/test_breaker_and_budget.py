"""The breaker, the budget and the deadline by themselves."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client.fleet.breaker import Breaker, BreakerState
from backend_client.lifetime import Deadline
from backend_client.options import BreakerOptions, RetryOptions
from backend_client.results import FailureKind
from backend_client.routing.call import RetryBudget


class Clock:
    """Time that is set by hand."""

    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker(BreakerOptions(), clock, random.Random(3))


def fail(breaker, harm=FailureKind.CONNECTION):
    return breaker.failed(breaker.begin(), harm)


@pytest.mark.parametrize(("harm", "times"), [(FailureKind.CONNECTION, 2), (FailureKind.SERVER, 5)])
def test_it_opens_after_failures_in_a_row(breaker, harm, times):
    for _ in range(times - 1):
        assert not fail(breaker, harm)
    breaker.succeeded(breaker.begin())
    for _ in range(times - 1):
        assert not fail(breaker, harm)
    assert breaker.admits()
    assert fail(breaker, harm)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits()


def test_harmless_failures_never_open_it(breaker):
    for _ in range(100):
        assert not fail(breaker, FailureKind.NONE)


def test_a_trial_closes_or_opens_it_again_for_longer(breaker, clock):
    fail(breaker)
    fail(breaker)
    assert 0.8 <= breaker.opens_in <= 1.2
    clock.now += 1.2
    assert breaker.state is BreakerState.HALF_OPEN
    ticket = breaker.begin()
    assert ticket
    assert not breaker.admits()
    breaker.failed(ticket, FailureKind.SERVER)
    assert 1.6 <= breaker.opens_in <= 2.4
    clock.now += 2.4
    breaker.succeeded(breaker.begin())
    assert breaker.state is BreakerState.CLOSED


def test_a_trial_that_was_given_up_leaves_room_for_another(breaker, clock):
    fail(breaker)
    fail(breaker)
    clock.now += 1.2
    breaker.abandoned(breaker.begin())
    assert breaker.admits()


def test_reports_from_before_it_opened_change_nothing(breaker, clock):
    early = [breaker.begin() for _ in range(5)]
    breaker.failed(early[0], FailureKind.CONNECTION)
    breaker.failed(early[1], FailureKind.CONNECTION)
    until = breaker.opens_in
    breaker.failed(early[2], FailureKind.CONNECTION)
    breaker.succeeded(early[3])
    assert breaker.opens_in == until
    clock.now += 2
    trial = breaker.begin()
    breaker.trip()
    breaker.succeeded(trial)
    assert breaker.state is BreakerState.OPEN


def test_evidence_of_recovery_shortens_it(breaker):
    for _ in range(6):
        breaker.trip()
    assert breaker.opens_in > 20
    breaker.shorten_quarantine()
    assert breaker.opens_in <= 1.0


def test_the_budget_earns_by_calls_and_by_time(clock):
    budget = RetryBudget(RetryOptions(), clock)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.deposit()
    assert [budget.withdraw() for _ in range(2)] == [True, False]
    clock.now += 3
    assert [budget.withdraw() for _ in range(4)] == [True, True, True, False]
    clock.now += 1e6
    assert budget.balance == 100


@given(st.lists(st.one_of(st.none(), st.floats(0, 10)), max_size=200))
def test_the_budget_is_never_overdrawn(steps):
    clock = Clock()
    budget = RetryBudget(RetryOptions(), clock)
    calls = retries = 0
    for step in steps:
        if step is None:
            budget.deposit()
            calls += 1
        else:
            clock.now += step
        retries += budget.withdraw()
        assert retries <= 2 + 0.1 * calls + (clock.now - 50.0) + 1e-6


def test_a_deadline_travels_as_what_remains(clock):
    deadline = Deadline.after(1.2345, clock)
    clock.now += 0.2
    assert deadline.remaining_ms() == 1034
    assert deadline.earlier(1.0).remaining() == pytest.approx(0.0345)
    clock.now += 5
    assert (deadline.remaining(), deadline.remaining_ms()) == (0.0, 0)


def test_good_service_is_forgotten_bad(breaker, clock):
    for _ in range(4):
        breaker.trip()
    clock.now += 30
    breaker.succeeded(breaker.begin())
    clock.now += 30
    breaker.trip()
    assert breaker.opens_in <= 1.2
