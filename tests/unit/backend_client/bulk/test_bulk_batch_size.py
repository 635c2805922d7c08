"""How many texts a request of a data set has."""

import pytest

from backend_client.bulk.embedding import BatchSize


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        ([0.1, 0.1, 0.1, 0.1], 256),
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
