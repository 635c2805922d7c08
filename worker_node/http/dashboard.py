"""What the built-in dashboard shows: the state that it fetches every second, with its history, and events.

History and events are in memory and bounded: differences of the node's counters in rings of two minutes, 15 minutes and
a day. Nothing here holds a word of any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from aiohttp import web
from prometheus_client.registry import Collector

from worker_node import __version__
from worker_node.core.errors import BadRequest
from worker_node.devices.memory import process_use
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.http import health
from worker_node.http.replies import Health, Reply, json_response
from worker_node.http.routes import JSON, ApiOperation
from worker_node.node import Node
from worker_node.observability.metrics import Failure, Telemetry

Level = Literal["good", "warn", "bad", "off"]
KEPT = 200
_WORDS: dict[EngineState, tuple[str, Level]] = {
    EngineState.UNLOADED: ("not loaded", "off"),
    EngineState.STARTING: ("loading", "warn"),
    EngineState.READY: ("ready", "good"),
    EngineState.BACKING_OFF: ("down", "bad"),
    EngineState.QUARANTINED: ("quarantined", "bad"),
    EngineState.FAILED: ("failed", "bad"),
    EngineState.STOPPED: ("stopped", "off"),
}


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """`at` is Unix time; `subject` an engine ("model on DEVICE") or the node; `why` is None if not known."""

    at: float
    subject: str
    what: str
    level: Level
    why: str | None = None


class EventLog:
    """The latest events. Pure: the caller passes the engines, which are compared with those of the last call."""

    def __init__(self) -> None:
        self._events: deque[NodeEvent] = deque(maxlen=KEPT)
        self._seen: dict[str, tuple[EngineState, int]] = {}

    def add(self, subject: str, what: str, level: Level, why: str | None = None) -> None:
        self._events.append(NodeEvent(round(time.time(), 3), subject, what, level, why))

    def observe(self, engines: Iterable[tuple[str, EngineStatus]]) -> None:
        """Compare the engines, by name, with the last call: changes of state, restarts, engines added and removed."""
        now = dict(engines)
        for name, status in now.items():
            before = self._seen.get(name)
            self._seen[name] = (status.state, status.restarts)
            if before == self._seen[name]:
                continue
            word, level = _WORDS[status.state]
            if before is not None and status.restarts > before[1] and status.state is EngineState.READY:
                # It restarted between two observations.
                self.add(name, "restarted", "bad", status.reason)
            elif before is None or status.state is not before[0]:
                self.add(name, word, level, status.reason if status.reason != word else None)
        for name in self._seen.keys() - now.keys():
            del self._seen[name]
            self.add(name, "removed", "off")

    def latest_first(self) -> list[NodeEvent]:
        return list(reversed(self._events))


PERIOD_S = 1.0
_RECENT = "2m"
# By the name that the page asks for: seconds of a sample, and how many are kept.
RANGES = {_RECENT: (PERIOD_S, 120), "15m": (5.0, 180), "24h": (300.0, 288)}
# Fields of the samples: rates of counters, and gauges.
_RATES = ("requests", "prompt_tokens", "output_tokens", "texts", "npu", "errors", "cpu")
SERIES = ("seconds", *_RATES, "embedding_ms", "in_flight", "queued", "memory")


Numbers = dict[str, float | None]


class History:
    """The latest samples, oldest first. Pure: the caller passes readings with their monotonic times.

    A sample has its length in `seconds`, more than a period if the node was busy, the rates of the counters in it, per
    second (of the NPU and the CPU: the share of one that was busy), the mean time of an embedding request, and the
    `gauges` at its end. None: unknown.
    """

    def __init__(self, samples: int, period_s: float) -> None:
        self.period_s = period_s
        self._samples: deque[Numbers] = deque(maxlen=samples)
        self._last: tuple[float, Numbers] | None = None

    def add(self, counters: Numbers, gauges: Numbers, now: float) -> None:
        """Take a reading if one falls due; from the second one on each makes a sample."""
        # Half a reading early is not too early.
        if self._last is not None and now - self._last[0] < self.period_s - PERIOD_S / 2:
            return
        if self._last is not None:
            then, before = self._last
            rates = {name: _rate(before[name], count, now - then) for name, count in counters.items()}
            embeddings, busy_s, npu = rates.pop("embeddings"), rates.pop("embedding_s"), rates["npu"]
            rates["npu"] = None if npu is None else min(1.0, npu)
            rates["embedding_ms"] = busy_s / embeddings * 1e3 if embeddings and busy_s is not None else None
            self._samples.append({"seconds": now - then, **rates, **gauges})
        self._last = (now, counters)

    @property
    def requests(self) -> int:
        return round(sum((sample["requests"] or 0) * (sample["seconds"] or 0) for sample in self._samples))

    def series(self) -> dict[str, list[float | None]]:
        return {
            name: [None if (value := sample[name]) is None else round(value, 3) for sample in self._samples]
            for name in SERIES
        }


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    """None where the count fell: a device was reset, or a process ended and took its time with it."""
    if before is None or after is None or after < before:
        return None
    return (after - before) / seconds


def read(node: Node) -> tuple[Numbers, Numbers]:
    """The node's counters since it started (of time: seconds), and its gauges; None where one cannot be read."""
    telemetry, models = node.telemetry, node.manager.models
    placements = [placement for model in models for placement in model.placements]
    pids = [pid for placement in placements if (pid := placement.engine.status.pid) is not None]
    uses = [use for pid in (os.getpid(), *pids) if (use := process_use(pid)) is not None]
    npu_us = node.npu.busy_time().value
    made = {what: total(counter) for what, counter in telemetry.made.items()}
    embedders = {model.id for model in models if model.installed.dimensions is not None}
    counters: Numbers = {
        "requests": total(telemetry.routes),
        "prompt_tokens": total(telemetry.prompt_tokens),
        "output_tokens": made.get("tokens", 0.0),
        "texts": made.get("texts", 0.0),
        "errors": total(telemetry.errors),
        "npu": None if npu_us is None else npu_us / 1e6,
        "cpu": sum(use.cpu_s for use in uses) if uses else None,
        "embeddings": total(telemetry.latency, "_count", embedders),
        "embedding_s": total(telemetry.latency, "_sum", embedders),
    }
    queued = sum(placement.admission.queue_depth for placement in placements)
    memory = sum(use.resident for use in uses) if uses else None
    return counters, {"in_flight": node.state.running, "queued": queued, "memory": memory}


def energy(telemetry: Telemetry) -> dict[str, dict[str, float]]:
    """What was made, by the dashboard's word for it, with how many joules, where these were measured."""
    joules: dict[tuple[str, str], float] = {}
    for labels, value in _samples(telemetry.joules):
        place = labels["model"], labels["device"]
        joules[place] = joules.get(place, 0.0) + value
    found = {}
    for what, counter in telemetry.made.items():
        made = {(labels["model"], labels["device"]): value for labels, value in _samples(counter)}
        measured = made.keys() & joules.keys()
        if measured:
            found[what] = {
                "made": sum(made[place] for place in measured),
                "joules": round(sum(joules[place] for place in measured), 6),
            }
    return found


def total(metric: Collector, end: str = "_total", models: Collection[str] | None = None) -> float:
    """The sum of a metric's samples whose names have this `end`, over all labels or those of these models."""
    return sum(value for labels, value in _samples(metric, end) if models is None or labels["model"] in models)


def _samples(metric: Collector, end: str = "_total") -> Iterator[tuple[dict[str, str], float]]:
    for family in metric.collect():
        for sample in family.samples:
            if sample.name == f"{family.name}{end}":
                yield sample.labels, sample.value


class Dashboard:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.events = EventLog()
        self.histories = {name: History(samples, period_s) for name, (period_s, samples) in RANGES.items()}

    async def running(self, _app: web.Application) -> AsyncIterator[None]:
        """For `app.cleanup_ctx`: the history is kept while the application runs."""
        self.events.add("the node", f"started, version {__version__}", "good")
        self._node.followers.append(lambda _settings: self.events.add("the node", "settings reloaded", "good"))
        keeper = asyncio.create_task(self._keep(), name="dashboard history")
        yield
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper

    async def _keep(self) -> None:
        """Take a reading every second, and record what changed, until cancelled."""
        while True:
            counters, gauges = read(self._node)
            for history in self.histories.values():
                history.add(counters, gauges, time.monotonic())
            self.events.observe(
                (f"{model.id} on {placement.device}", placement.status)
                for model in self._node.manager.models
                for placement in model.placements
            )
            await asyncio.sleep(PERIOD_S)

    def state(self) -> dict[str, Any]:
        """What /health says, and besides it the history, the routes, the recent failures, the times to first token, the
        events, what each model has made since the start (`made`: tokens, texts, documents or seconds of audio), and
        what that cost (`energy`).

        `at`, and the times of failures, are Unix times by the node's clock.
        """
        node, telemetry, history = self._node, self._node.telemetry, self.histories[_RECENT]
        made: dict[str, dict[str, int]] = {}
        for what, counter in telemetry.made.items():
            for labels, value in _samples(counter):
                counts = made.setdefault(labels["model"], {})
                counts[what] = counts.get(what, 0) + int(value)
        routes = [{**labels, "count": int(value)} for labels, value in _samples(telemetry.routes)]
        return {
            "kind": "node",
            "name": socket.gethostname(),
            "at": round(time.time(), 3),
            **health.report(node),
            "in_flight": node.state.running,
            "requests": int(total(telemetry.routes)),
            "recent_requests": history.requests,
            "history": {"period_s": PERIOD_S, **history.series()},
            "first_token_ms": first_token_ms(telemetry.first_tokens, time.monotonic()),
            "routes": sorted(routes, key=lambda route: -route["count"]),
            "made": made,
            "energy": energy(telemetry),
            "cores": os.cpu_count(),
            "grafana": node.settings.grafana_url,
            "events": self.events.latest_first(),
            "failures": telemetry.failures.latest_first(),
        }


FIRST_TOKEN_WINDOW_S = 900.0


def first_token_ms(latest: deque[tuple[float, float]], now: float) -> dict[str, float | int | None]:
    """Median and 95th percentile, in milliseconds, of answers (end, seconds) in the window; None if there are none."""
    recent = [seconds for at, seconds in latest if now - at <= FIRST_TOKEN_WINDOW_S]
    p50, p95 = np.percentile(recent, (50, 95)) * 1e3 if recent else (None, None)
    return {
        "answers": len(recent),
        "window_s": FIRST_TOKEN_WINDOW_S,
        "p50": None if p50 is None else round(float(p50), 1),
        "p95": None if p95 is None else round(float(p95), 1),
    }


DASHBOARD = web.AppKey("dashboard", Dashboard)
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


async def _state(request: web.Request) -> web.Response:
    return json_response(request.app[DASHBOARD].state(), headers=_HEADERS)


async def _history(request: web.Request) -> web.Response:
    history = request.app[DASHBOARD].histories.get(request.query.get("range", "15m"))
    if history is None:
        raise BadRequest("range: 15m or 24h", param="range")
    return json_response({"period_s": history.period_s, **history.series()}, headers=_HEADERS)


class DashboardState(Health):
    """GET /dashboard/state."""

    kind: Literal["node"]
    name: str
    at: float
    in_flight: int
    requests: int
    history: dict[str, Any]
    first_token_ms: dict[str, Any]
    routes: list[dict[str, Any]]
    made: dict[str, dict[str, int]]
    energy: dict[str, dict[str, float]]
    cores: int | None
    grafana: str | None
    events: list[NodeEvent]
    failures: list[Failure]


class DashboardHistory(Reply):
    """GET /dashboard/history: samples by field, oldest first, each of `period_s` seconds or of more: `seconds`."""

    period_s: float
    seconds: list[float]
    requests: list[float]


OPERATIONS = (
    ApiOperation("get", "/dashboard/state", _state, "What the dashboard shows", {JSON: DashboardState}),
    ApiOperation("get", "/dashboard/history", _history, "Its longer history", {JSON: DashboardHistory}),
)
