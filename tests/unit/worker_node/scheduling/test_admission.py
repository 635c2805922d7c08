"""Admission control: permits while there are places and time, refusals with a time to come back."""

import contextlib

import pytest

from worker_node.core.errors import DeadlineExceeded, Overloaded
from worker_node.scheduling.admission import Admission, AdmissionLimits, TokenCost
from worker_node.scheduling.texts import TURN_TOKENS

FAR = 1e6


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def admission(clock):
    return Admission("m on CPU", AdmissionLimits(max_outstanding=4), clock)


def engine_of(clock, rate=100, **limits):
    """Embeddings at `rate` tokens a second."""
    admission = Admission("m on CPU", AdmissionLimits(max_outstanding=1000, **limits), clock)
    with admission.permit(1, FAR) as permit:
        permit.measured(10 * rate, 10.0)
    return admission


def test_a_permit_is_returned_when_the_work_fails(admission):
    with pytest.raises(RuntimeError, match="boom"), admission.permit(3, deadline=10, work=TokenCost(5, 10)):
        raise RuntimeError("boom")
    assert admission.outstanding == 0
    assert not admission.prefilling


def test_a_full_queue_is_refused_with_a_retry_after_from_the_measured_rate(clock):
    admission = engine_of(clock)
    with (
        admission.permit(1000, deadline=FAR, work=TokenCost(200)),
        pytest.raises(Overloaded, match="1000 of 1000") as caught,
        admission.permit(1, deadline=FAR),
    ):
        pass
    assert caught.value.retry_after == pytest.approx(2.0, rel=0.2)


def test_batch_work_leaves_places_for_interactive_work(admission):
    with admission.permit(3, deadline=FAR, interactive=False):
        with pytest.raises(Overloaded, match="3 of 3 places for batch work"):
            admission.check(1, FAR, interactive=False)
        admission.check(1, FAR)


def test_large_requests_leave_places_for_small_ones(clock):
    admission = engine_of(clock)
    with admission.permit(700, FAR):
        with pytest.raises(Overloaded, match="700 of 750 places for large requests"):
            admission.check(100, FAR)
        admission.check(10, FAR)


def test_a_small_embedding_waits_for_turns_of_a_large_one_and_a_large_one_to_its_end(clock):
    admission = engine_of(clock, rate=1000)
    with admission.permit(500, FAR, work=TokenCost(500_000)):
        admission.check(1, clock.now + 10, work=TokenCost(100))
        with pytest.raises(Overloaded, match=r"wait of about 500\.0 s"):
            admission.check(200, FAR, work=TokenCost(500_000))
        with admission.permit(1, FAR, work=TokenCost(500)):
            assert admission.expected_wait() == pytest.approx((TURN_TOKENS + 500) / 1000, rel=0.01)
    assert admission.expected_wait() == 0


def test_a_prompt_waits_for_those_that_are_not_longer_and_one_step_of_the_others(clock):
    admission = engine_of(clock, sequences=8, step_tokens=200, rate=1000)
    with admission.permit(1, FAR, work=TokenCost(80_000, 1)):
        assert admission.expected_wait(tokens=80_000) == pytest.approx(80)
        assert admission.expected_wait(tokens=150) == pytest.approx(200 / 1000)
        with admission.permit(1, FAR, work=TokenCost(150, 1)):
            assert admission.expected_wait(tokens=100) == pytest.approx((150 + 200) / 1000)


def test_a_deadline_that_would_pass_in_the_queue_is_refused_now(clock):
    admission = engine_of(clock)
    with admission.permit(1, FAR, work=TokenCost(200)):
        # Two seconds of work are before it: 2.5 s would just do, which under load is just too late.
        # The message has the wait, the longest that is accepted, and the time left: all three decide.
        with pytest.raises(
            Overloaded, match=r"of about 2\.0 s is longer than the 1\.\d s .* has 2\.5 s until its deadline"
        ):
            admission.check(1, clock.now + 2.5)
        admission.check(1, clock.now + 4, work=TokenCost(50))
        with pytest.raises(Overloaded, match=r"has 4\.0 s until its deadline"):
            admission.check(1, clock.now + 4, work=TokenCost(150))


def test_nothing_is_queued_for_longer_than_the_limit(clock):
    admission = engine_of(clock, max_wait_s=10.0)
    with admission.permit(1, FAR, work=TokenCost(900)):
        admission.check(1, FAR)
        with (
            admission.permit(1, FAR, work=TokenCost(900)),
            pytest.raises(Overloaded, match="10 s that anything is queued") as caught,
        ):
            admission.check(1, FAR)
    assert caught.value.retry_after == pytest.approx(18.0, rel=0.1)


def test_interactive_work_waits_for_interactive_work_and_one_step_of_batch_work(clock):
    admission = engine_of(clock, step_tokens=50)
    with admission.permit(500, FAR, work=TokenCost(100_000), interactive=False):
        assert admission.expected_wait(interactive=True) == pytest.approx(0.5)
        # The turns of the large request if it is small itself, and to its end if it is as large.
        assert admission.expected_wait(interactive=False) == pytest.approx((TURN_TOKENS + 50) / 100, rel=0.01)
        admission.check(1, clock.now + 2)
        with pytest.raises(Overloaded):
            admission.check(1, FAR, work=TokenCost(50_000), interactive=False)
        with admission.permit(1, FAR, work=TokenCost(90)):
            assert admission.expected_wait(interactive=True) == pytest.approx(1.4)


def test_a_deadline_that_has_passed_is_no_overload(admission, clock):
    clock.now = 5.0
    with pytest.raises(DeadlineExceeded), admission.permit(1, deadline=5.0):
        pass


def test_without_a_measurement_nothing_is_predicted(admission):
    with admission.permit(3, 10, work=TokenCost(100, 10)), admission.permit(1, deadline=0.001, work=TokenCost(100)):
        assert admission.outstanding == 4
        assert admission.expected_wait() is None


def test_rates_of_an_earlier_measurement_count_until_the_engines_own_do(clock):
    admission = Admission("m", AdmissionLimits(4, sequences=1, step_tokens=64), clock)
    admission.assume(prefill=100.0, decode=10.0)
    with contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(admission.permit(1, FAR, work=TokenCost(200, 20))) for _ in range(4)]
        with pytest.raises(Overloaded) as refused:
            admission.check(1, FAR, work=TokenCost(200, 20))
        # Three prompts of 2 s behind a fourth, and four answers of 2 s.
        assert refused.value.retry_after == pytest.approx(8 + 8, rel=0.1)
        clock.now += 0.02
        first.progressed(1, prefilled=(5000, 0.5))
        assert admission.expected_wait() < 9
    assert Admission("m", AdmissionLimits(4), clock).prefill_rate.seconds(1) is None


def test_the_first_short_prompt_of_a_burst_does_not_make_a_new_engine_look_slow(clock):
    """A step takes nearly as long with one short prompt as with many; the others had not come when it began."""
    admission = Admission("m", AdmissionLimits(1024, 256, sequences=256, step_tokens=256), clock)
    with contextlib.ExitStack() as stack:
        permits = [stack.enter_context(admission.permit(1, FAR, work=TokenCost(40, 12))) for _ in range(40)]
        clock.now += 0.5
        permits[0].progressed(1, prefilled=(40, 0.5))
        admission.check(1, clock.now + 18.0, work=TokenCost(40, 12))
        # Steps that hold as many as there are tell the rate.
        clock.now += 0.6
        for index, permit in enumerate(permits[1:7]):
            permit.progressed(1, prefilled=(0, 0.0) if index else (240, 0.6))
        assert admission.expected_wait() == pytest.approx(33 * 40 / (240 / 0.6), rel=0.3)
