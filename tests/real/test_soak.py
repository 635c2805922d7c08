"""A short form of the soak that `python -m tests.chaos.soak` runs for half an hour."""

import asyncio

import pytest

from tests.chaos.soak import EMBEDDING_CALLERS, GENERATION_CALLERS, soak
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(300)]


def test_under_mixed_load_and_engine_kills_nothing_is_lost(long, quick_models):
    # 12 s, or a minute with --long: engines are killed in turn, and restart while the load goes on.
    seconds, kill_every = (60, 20) if long else (12, 3.5)
    with start_node("--log-level", "error", **quick_models) as node:
        report = asyncio.run(soak(node, seconds, kill_every))
        restarts = sum(engine["restarts"] for model in node.health()[1]["models"] for engine in model["engines"])
    print(report)
    assert report.kills
    assert not report.lost
    assert report.answered["/embeddings"] >= EMBEDDING_CALLERS
    assert report.answered["/inference"] >= GENERATION_CALLERS
    # The node runs again what was on board and had no token yet: a caller need not hear of a kill.
    assert restarts + report.retried["engine_unavailable"] + report.retried["model_loading"] > 0
    # Whether memory stays flat shows over half an hour, not here.
    assert report.descriptors[-1] <= report.descriptors[0] + 16
