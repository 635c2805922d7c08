"""The door: permits while there is room, refusals with a time to come back."""

import pytest

from worker_node.errors import DeadlineExceeded, Overloaded
from worker_node.scheduling.admission import Admission, AdmissionLimits


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def door(clock):
    return Admission("m on CPU", AdmissionLimits(max_outstanding=4), clock)


def work(door, clock, units, seconds):
    with door.permit(units, deadline=clock.now + 1e6):
        clock.now += seconds


def test_permits_are_counted_and_returned(door):
    with door.permit(3, deadline=10):
        assert (door.outstanding, door.queue_depth) == (3, 2)
    assert door.outstanding == 0


def test_a_permit_is_returned_when_the_work_fails(door):
    with pytest.raises(RuntimeError, match="boom"), door.permit(3, deadline=10):
        raise RuntimeError("boom")
    assert door.outstanding == 0


def test_a_full_queue_is_refused_with_a_retry_after_from_the_drain_rate(door, clock):
    work(door, clock, units=4, seconds=2.0)
    with door.permit(4, deadline=1e6), pytest.raises(Overloaded) as caught, door.permit(1, deadline=1e6):
        pass
    assert caught.value.retry_after == pytest.approx(2.0, rel=0.2)


def test_batch_work_leaves_places_for_interactive_work(door):
    with door.permit(3, deadline=1e6, interactive=False):
        with pytest.raises(Overloaded, match="3 of 3 places for batch work"):
            door.check(1, 1e6, interactive=False)
        door.check(1, 1e6)


def test_a_request_larger_than_the_queue_runs_when_nothing_else_does(door):
    with door.permit(100, deadline=10):
        assert door.outstanding == 100


def test_a_deadline_that_would_pass_in_the_queue_is_refused_now(door, clock):
    work(door, clock, units=1, seconds=1.0)
    with door.permit(2, deadline=1e6):
        # Two wait before it at one a second: 2.5 s would just do, which under load is just too late.
        with pytest.raises(Overloaded, match="longer than the request's deadline"), door.permit(1, clock.now + 2.5):
            pass
        with door.permit(1, clock.now + 10):
            assert door.outstanding == 3


def test_nothing_is_queued_for_longer_than_the_limit(clock):
    door = Admission("m on CPU", AdmissionLimits(max_outstanding=1000, max_wait_s=10.0), clock)
    work(door, clock, units=1, seconds=1.0)
    with door.permit(9, deadline=1e6):
        door.check(1, deadline=1e6)
        with door.permit(10, deadline=1e6), pytest.raises(Overloaded, match="10 s that anything is queued"):
            door.check(1, deadline=1e6)
    assert door.outstanding == 0


def test_a_deadline_that_has_passed_is_no_overload(door, clock):
    clock.now = 5.0
    with pytest.raises(DeadlineExceeded), door.permit(1, deadline=5.0):
        pass


def test_what_its_deadline_took_out_of_the_queue_does_not_make_the_engine_look_slow(door, clock):
    work(door, clock, units=1, seconds=1.0)
    for _ in range(20):
        with pytest.raises(DeadlineExceeded), door.permit(1, deadline=1e6):
            clock.now += 1.0
            raise DeadlineExceeded("too late")
    with door.permit(2, deadline=1e6):
        assert door.expected_wait() < 3


def test_without_a_measurement_nothing_is_predicted(door):
    with door.permit(3, deadline=10), door.permit(1, deadline=0.001):
        assert door.outstanding == 4
