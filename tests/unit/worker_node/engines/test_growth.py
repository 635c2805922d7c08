"""When a process whose memory grows is replaced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.restart import GrowthLimits, default_growth

GIB = 2**30


@pytest.mark.parametrize(
    ("grown", "idle", "expected"),
    [
        (999, True, None),
        (1000, False, None),
        (1000, True, "idle"),
        (1999, False, None),
        (2000, False, "forced"),
        (2000, True, "idle"),
    ],
)
def test_how_a_process_is_replaced(grown, idle, expected):
    assert GrowthLimits(growth=1000).replacement(grown, idle=idle) == expected
    assert GrowthLimits().replacement(grown, idle=idle) is None


@given(st.integers(0, 2**50))
def test_the_default_is_a_share_of_the_machine_within_bounds(total):
    growth = default_growth(total)
    assert GIB <= growth <= 8 * GIB
    if 8 * GIB <= total <= 64 * GIB:
        assert growth == total // 8
