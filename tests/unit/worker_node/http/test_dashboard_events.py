"""The event log of a node: what changed between two looks, and no more than is kept."""

import pytest

from tests.support.application import application
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.http.dashboard import KEPT, EventLog
from worker_node.settings import NodeSettings


@pytest.fixture
def log():
    return EventLog(clock=lambda: 1000.0)


def told(log):
    return [(event["subject"], event["what"], event["level"]) for event in reversed(log.latest_first())]


def test_changes_of_an_engine_are_told_once(log):
    for state in (EngineState.STARTING, EngineState.STARTING, EngineState.READY, EngineState.READY):
        log.observe([("m on NPU", EngineStatus(state))])
    log.observe([("m on NPU", EngineStatus(EngineState.QUARANTINED, "wrong answers"))])
    assert told(log) == [
        ("m on NPU", "loading", "warn"),
        ("m on NPU", "ready", "good"),
        ("m on NPU", "quarantined", "bad"),
    ]
    assert log.latest_first()[0]["why"] == "wrong answers"


def test_an_engine_that_fell_and_came_back_between_two_looks_was_restarted(log):
    log.observe([("m on CPU", EngineStatus(EngineState.READY))])
    log.observe([("m on CPU", EngineStatus(EngineState.READY, restarts=1))])
    assert told(log)[1:] == [("m on CPU", "restarted", "bad")]


def test_a_model_that_is_gone_was_removed(log):
    log.observe([("m on CPU", EngineStatus(EngineState.READY))])
    log.observe([])
    log.observe([])
    assert told(log)[1:] == [("m on CPU", "removed", "off")]


def test_only_the_latest_events_are_kept(log):
    for number in range(KEPT + 5):
        log.add("the node", str(number), "good")
    assert len(log.latest_first()) == KEPT
    assert log.latest_first()[0]["what"] == str(KEPT + 4)


async def test_the_state_tells_that_the_node_started_and_the_history_is_by_range():
    async with application([], NodeSettings(grafana_url="http://grafana.example:3000/d/npu")) as (client, _):
        async with client.get("/dashboard/state") as reply:
            state = await reply.json()
        assert state["events"][-1]["what"].startswith("started, version ")
        assert state["grafana"] == "http://grafana.example:3000/d/npu"
        for name, period in (("15m", 5.0), ("24h", 300.0)):
            async with client.get("/dashboard/history", params={"range": name}) as reply:
                assert (reply.status, (await reply.json())["period_s"]) == (200, period)
        async with client.get("/dashboard/history", params={"range": "1y"}) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "range")
