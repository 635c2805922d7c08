"""The dashboard: its history and its events."""

import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.application import application
from worker_node.core.types import Device
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.http.dashboard import (
    FIRST_TOKEN_WINDOW_S,
    RANGES,
    SAMPLES,
    EventLog,
    Histories,
    History,
    first_token_ms,
    total,
    usage,
)
from worker_node.observability.metrics import Telemetry
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.metrics import declare_generation_metrics

COUNTERS = dict.fromkeys(("requests", "prompt_tokens", "output_tokens", "texts", "errors", "embeddings"), 0) | {
    "embedding_s": 0.0,
    "npu": None,
    "cpu": None,
}


def add(history, now, *, in_flight=0, queued=0, memory=None, **counters):
    history.add(COUNTERS | counters, {"in_flight": in_flight, "queued": queued, "memory": memory}, now)


def test_a_sample_is_the_difference_of_two_readings_per_second():
    history = History()
    add(history, 100.0)
    assert history.series()["requests"] == []
    add(history, 102.0, requests=4, prompt_tokens=60, output_tokens=30, texts=10, in_flight=2, queued=3)
    assert history.series() == {
        "seconds": [2.0],
        "requests": [2.0],
        "prompt_tokens": [30.0],
        "output_tokens": [15.0],
        "texts": [5.0],
        "npu": [None],
        "in_flight": [2],
        "queued": [3],
        "errors": [0.0],
        "embedding_ms": [None],
        "cpu": [None],
        "memory": [None],
    }


def test_requests_are_counted_however_late_the_readings_are():
    """The fleet's page divides these counts: rates would show less of a node whose readings are late under load."""
    punctual, late = History(samples=3), History(samples=3)
    for second in (0, 1, 2):
        add(punctual, float(second), requests=3 * second)
    add(late, 0.0)
    add(late, 2.7, requests=6)
    assert punctual.requests == late.requests == 6
    for second in (3, 4, 5):
        add(punctual, float(second), requests=6)
    assert punctual.requests == 0, "older than the samples that are kept"


def test_errors_cpu_memory_and_the_time_of_an_embedding():
    history = History()
    add(history, 0.0, cpu=10.0, memory=100)
    later = {"errors": 3, "embeddings": 4, "embedding_s": 0.2}
    add(history, 1.0, cpu=11.5, memory=120, **later)
    # A process that ended took its CPU time with it.
    add(history, 2.0, cpu=9.0, memory=80, **later)
    series = history.series()
    assert (series["errors"], series["embedding_ms"]) == ([3.0, 0.0], [50.0, None])
    assert (series["cpu"], series["memory"]) == ([1.5, None], [120, 80])


def test_the_longer_histories_are_means_over_their_own_periods_and_bounded():
    histories = Histories()
    for second in range(2000):
        add(histories, float(second), requests=2 * second)
    assert set(histories.longer["15m"].series()["requests"]) == {2.0}
    assert len(histories.longer["15m"].series()["requests"]) == RANGES["15m"][1]
    assert len(histories.longer["24h"].series()["requests"]) == 1999 // 300
    assert len(histories.recent.series()["requests"]) == SAMPLES


def test_a_clock_that_drifts_below_the_period_misses_no_sample():
    histories = Histories()
    for look in range(101):
        add(histories, look * 0.999)
    assert len(histories.longer["15m"].series()["requests"]) == 20


def test_the_usage_of_this_process_is_read():
    cpu, memory = usage([os.getpid(), 2**22 + 1])
    assert cpu > 0
    assert memory > 1 << 20
    assert usage([2**22 + 1]) is None


def test_the_npu_share_is_of_wall_time_and_unknown_when_the_counter_goes_backwards():
    history = History()
    for at, busy in enumerate((0, 0.25, 1.75, 0.1, 0.1)):
        add(history, float(at), npu=busy)
    # More than a second of work in a second is a full one; a counter that fell is a device that was reset.
    assert history.series()["npu"] == [0.25, 1.0, None, 0.0]


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=3 * SAMPLES))
def test_the_rings_are_bounded_and_hold_the_latest(steps):
    history = History()
    counted = 0
    for at, step in enumerate(steps):
        counted += step
        add(history, float(at), texts=counted)
    series = history.series()
    assert {len(values) for values in series.values()} == {min(len(steps) - 1, SAMPLES)}
    assert set(series["seconds"]) == {1.0}
    assert series["texts"] == [float(step) for step in steps[1:]][-SAMPLES:]


def test_a_total_is_over_all_labels():
    telemetry = Telemetry()
    declare_generation_metrics(telemetry)
    assert total(telemetry.made["tokens"]) == 0
    telemetry.made["tokens"].labels("a", Device.NPU).inc(3)
    telemetry.made["tokens"].labels("b", Device.CPU).inc(4)
    assert total(telemetry.made["tokens"]) == 7


def test_first_tokens_are_those_of_the_window():
    now = 5000.0
    latest = deque([(now - FIRST_TOKEN_WINDOW_S - 1, 99.0), (now - 2, 0.1), (now - 1, 0.2), (now, 0.3)])
    told = first_token_ms(latest, now)
    assert (told["answers"], told["p50"]) == (3, 200.0)
    assert told["p95"] == pytest.approx(290.0)


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
