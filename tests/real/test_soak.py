"""A short form of the soak that `python -m benchmarks.soak` runs for half an hour."""

import asyncio

import pytest

from benchmarks.soak import soak
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(300)]


def test_under_mixed_load_and_engine_kills_nothing_is_lost_and_nothing_grows(long, quick_models):
    # 12 s, or a minute with --long: an engine of each kind is killed, and restarts while the load goes on.
    seconds, kill_every = (60, 20) if long else (12, 3.5)
    with start_node("--log-level", "error", **quick_models) as node:
        report = asyncio.run(soak(node, seconds, kill_every))
        restarts = sum(engine["restarts"] for model in node.health()[1]["models"] for engine in model["engines"])
    print(report)
    assert report.kills == 2
    assert not report.lost
    assert report.answered["/embeddings"] > 3
    assert report.answered["/inference"] > 5
    # The node runs again what was on board and had no token yet: a caller need not hear of a kill.
    assert restarts + report.retried["engine_unavailable"] + report.retried["model_loading"] > 0
    assert report.flat, str(report)
