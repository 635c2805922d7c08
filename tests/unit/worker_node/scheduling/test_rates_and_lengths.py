"""What is learned from work: how fast it goes, and how long answers get."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.scheduling.wait_estimate import AnswerLengths, Load, Rate


def learned(answers, limit=4096):
    lengths = AnswerLengths()
    for answer in answers:
        generated = min(answer, limit)
        for token in range(generated):
            lengths.grew(token, 1)
        lengths.ended(generated, by_itself=answer < limit)
    return lengths


def test_a_rate_follows_the_last_work_not_the_last_seconds():
    rate = Rate(memory=100)
    assert rate.per_second is None
    rate.measured(1000, 10.0)
    assert rate.per_second == pytest.approx(100)
    rate.measured(1, 1.0)
    assert rate.per_second > 50
    rate.measured(1000, 100.0)
    assert rate.per_second == pytest.approx(10, rel=0.02)


def test_work_that_was_done_along_with_other_work_counts_without_time():
    rate = Rate(memory=10_000)
    rate.measured(10, 1.0)
    rate.measured(10, 0.0)
    assert rate.per_second == pytest.approx(20, rel=0.01)


def test_a_load_is_the_share_of_the_time_that_arriving_work_takes():
    load = Load()
    for second in range(100):
        load.arrived(0.4, float(second))
    assert load.share(100.0) == pytest.approx(0.4, rel=0.2)
    assert load.share(300.0) < 0.001


def test_answers_of_one_length_are_expected_to_have_it():
    lengths = learned([100] * 100)
    assert lengths.expected_rest(0, 4096) == pytest.approx(100, rel=0.15)
    assert lengths.expected_rest(50, 4096) == pytest.approx(50, rel=0.3)
    assert lengths.expected_rest(0, 20) == pytest.approx(20, rel=0.05)


def test_a_long_answer_among_short_ones_is_known_as_soon_as_it_is_longer_than_they_are():
    lengths = learned(([1] * 9 + [2000]) * 10)
    assert lengths.expected_rest(0, 4096) == pytest.approx(200, rel=0.4)
    assert lengths.expected_rest(10, 4096) == pytest.approx(1990, rel=0.3)
    assert lengths.rest_of(0.9, 0, 4096) < 2
    assert lengths.rest_of(0.05, 0, 4096) > 1000


def test_answers_that_were_cut_are_no_ends():
    lengths = learned([10**6] * 20, limit=500)
    assert lengths.expected_rest(0, 500) == pytest.approx(500, rel=0.1)


def test_before_anything_is_known_a_guess_stands_in():
    lengths = AnswerLengths()
    assert 150 < lengths.expected_rest(0, 10**6) < 400
    assert lengths.expected_rest(0, 10) == pytest.approx(10, rel=0.1)


def test_what_was_learned_fades():
    lengths = learned([1000] * 50 + [10] * 2000)
    assert lengths.expected_rest(0, 4096) < 40


@given(st.lists(st.integers(1, 3000), max_size=40), st.integers(0, 5000), st.integers(0, 5000), st.floats(0.001, 1))
def test_expectations_keep_their_bounds(answers, length, limit, share):
    lengths = AnswerLengths()
    for answer in answers:
        lengths.grew(0, answer)
        lengths.ended(answer, by_itself=True)
    rest = lengths.expected_rest(length, limit)
    assert 0 <= rest <= max(0, limit - length)
    assert rest <= lengths.expected_rest(length, limit + 100) + 1e-6
    assert lengths.rest_of(share, length, length + limit) <= limit + 1e-6


def test_geometric_answers_always_have_the_same_rest():
    rng = random.Random(3)
    lengths = learned([1 + int(rng.expovariate(1 / 80)) for _ in range(400)])
    for length in (0, 50, 150):
        assert lengths.expected_rest(length, 10**5) == pytest.approx(80, rel=0.35)
