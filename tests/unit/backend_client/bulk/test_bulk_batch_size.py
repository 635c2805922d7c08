"""How many texts a request of a data set has."""

import pytest

from backend_client.bulk.answers import BatchSize


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        ([0.1] * 9, 256),
        ([1.5, 3.0, 1.5], 64),
        ([0.6, 1.3, 1.3], 128),
        ([0.1, 0.1, 5.0], 128),
        ([0.1, 0.1, 5.0, 6.0, 9.0, 9.0], 64),
    ],
)
def test_requests_grow_while_the_fleet_is_quick_and_shrink_when_it_is_not(seconds, texts):
    size = BatchSize(64)
    for each in seconds:
        size.observe(size.texts, each)
    assert size.texts == texts


def test_a_short_request_says_nothing_about_longer_ones_and_a_larger_setting_stays():
    size = BatchSize(64)
    size.observe(5, 0.01)
    assert size.texts == 64
    size = BatchSize(1000)
    size.observe(1000, 0.01)
    size.observe(1000, 9.0)
    assert size.texts == 1000


@pytest.mark.parametrize(("slots", "most"), [(3, 256), (300, 256)])
def test_with_many_nodes_requests_stay_smaller_so_that_memory_stays_bounded(slots, most):
    size = BatchSize(64, slots)
    for _ in range(9):
        size.observe(size.texts, 0.1)
    assert size.texts == most


def test_requests_that_a_node_refuses_for_their_size_are_not_made_again():
    size = BatchSize(64)
    for _ in range(2):
        size.observe(size.texts, 0.1)
    size.refused(256)
    assert size.texts == 128
    size.observe(128, 0.1)
    assert size.texts == 128
    size.refused(64)
    assert size.texts == 128
