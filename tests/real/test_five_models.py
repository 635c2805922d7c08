"""Five models on a node with memory for about four: tests/chaos/five_models.py; --long asks for ten minutes."""

import pytest

from tests.chaos.five_models import BUDGET, measure

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("store")
def test_random_requests_for_five_models_lose_none_and_keep_the_budget(long):
    # More than 5 s: engines are loaded and evicted over and over.
    seen = measure(600 if long else 9)
    assert seen.lost == []
    assert seen.answers["answered"] > 0
    assert seen.most <= 1.1 * BUDGET
    if long:
        assert seen.lag_p999 <= 0.05
