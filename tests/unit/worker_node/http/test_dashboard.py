"""The dashboard: its history and its events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from tests.support.application import application
from worker_node.core.types import Busy, Device, Energy, Route, Timing, Usage
from worker_node.http.dashboard import RANGES, Dashboard, History, energy
from worker_node.observability.metrics import Telemetry
from worker_node.settings import NodeSettings

COUNTERS = dict.fromkeys(("requests", "prompt_tokens", "output_tokens", "texts", "errors", "embeddings"), 0) | {
    "embedding_s": 0.0,
    "npu": None,
    "cpu": None,
}


def add(history, now, *, in_flight=0, queued=0, memory=None, **counters):
    history.add(COUNTERS | counters, {"in_flight": in_flight, "queued": queued, "memory": memory}, now)


def test_the_npu_share_is_of_wall_time_and_unknown_when_the_counter_falls():
    history = History(120, 1.0)
    for at, busy in enumerate((0, 0.25, 1.75, 0.1, 0.1)):
        add(history, float(at), npu=busy)
    # More than a second of work in a second is a full one; a counter that fell is a device that was reset.
    assert history.series()["npu"] == [0.25, 1.0, None, 0.0]


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=2000))
def test_histories_are_bounded_and_hold_the_means_of_their_periods(steps):
    kept = Dashboard(None).histories
    counted = 0
    for at, step in enumerate(steps):
        counted += step
        for history in kept.values():
            # A clock that drifts below the period misses no sample.
            add(history, at * 0.999, texts=counted)
    for name, (period_s, most) in RANGES.items():
        texts = kept[name].series()["texts"]
        assert len(texts) == min(most, (len(steps) - 1) // int(period_s))
        if texts and len(texts) < most:
            whole = sum(steps[1 : len(texts) * int(period_s) + 1])
            assert sum(texts) * period_s * 0.999 == pytest.approx(whole, abs=1.0)


async def test_the_state_names_the_start_of_the_node_and_the_history_is_by_range():
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


def test_what_was_made_is_compared_with_joules_only_where_these_were_measured():
    telemetry = Telemetry()
    made = Counter("made", "", ("model", "device"), registry=telemetry.registry)
    telemetry.made["tokens"] = made

    def answer(model, device, tokens, joules):
        made.labels(model, device).inc(tokens)
        route = Route(model, device, "preferred", 5)
        telemetry.finished(route, Usage(5, tokens), Timing(0, 0, 1, 1), busy=Busy(energy=Energy(joules)))

    answer("m", Device.CPU, 1000, None)
    assert energy(telemetry) == {}
    answer("m", Device.NPU, 30, 2.5)
    answer("n", Device.NPU, 10, 0.5)
    answer("n", Device.NPU, 20, 1.0)
    assert energy(telemetry) == {"tokens": {"made": 60, "joules": 4.0}}
