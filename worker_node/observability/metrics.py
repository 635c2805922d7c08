"""The metrics that all tasks share, and the latest failures. Times in seconds, sizes in bytes; names as vLLM's."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from worker_node.core.errors import NodeError
from worker_node.core.types import NOT_MEASURED, Busy, Route, Timing, Usage

M = TypeVar("M")

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
# Seconds between readings of the lag: each wakes an idle process.
_LAG_PERIOD_S = 0.25
_FIRST_TOKENS_KEPT, _FAILURES_KEPT = 256, 50

# The creation time of each counter would be a second series for every one of them, and has no use here.
disable_created_metrics()  # type: ignore[no-untyped-call]


class OwnMetrics(Protocol):
    """The metrics of one task; `made` counts what its models have made, in `unit`."""

    unit: str
    made: Counter


@dataclass(frozen=True, slots=True)
class Failure:
    """Failures of one sort. `route` is the HTTP route as declared; `first` and `last` are `time.time()`.

    `model` and `device` are None for a request that was refused before it had a placement.
    """

    code: str
    status: int
    route: str
    model: str | None
    device: str | None
    count: int
    first: float
    last: float


@dataclass(slots=True)
class RecentFailures:
    """Bounded: equal failures are one entry with a count, so that a caller who repeats a mistake hides no other."""

    _entries: dict[tuple[str, str, str | None, str | None], Failure] = field(default_factory=dict)

    def add(self, error: NodeError, route: str) -> None:
        now = time.time()
        key = (error.code, route, error.model, error.device)
        known = self._entries.pop(key, None)
        if known is None:
            known = Failure(error.code, error.status, route, error.model, error.device, 0, now, now)
        self._entries[key] = replace(known, count=known.count + 1, last=now)
        if len(self._entries) > _FAILURES_KEPT:
            del self._entries[next(iter(self._entries))]

    def latest_first(self) -> list[Failure]:
        return list(reversed(self._entries.values()))


class Telemetry:
    """The metrics of one node, in a registry of their own, and its latest failures.

    `first_tokens` are the latest times to first token, as (monotonic time of the answer's end, seconds), because a
    histogram gives no accurate quantiles for few samples. `made` are counters of what requests produced, by the
    dashboard's word for it (tokens, texts). Tasks fill both.
    """

    def __init__(self) -> None:
        self.failures = RecentFailures()
        self.registry = CollectorRegistry(auto_describe=True)
        # process_*: memory, descriptors, CPU and start time of the edge process, by Prometheus' own names.
        ProcessCollector(registry=self.registry)
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=_FIRST_TOKENS_KEPT)
        self.made: dict[str, Counter] = {}
        self._own: dict[Callable[[CollectorRegistry], Any], Any] = {}
        by_route = ("model", "device")

        def counter(name: str, text: str, labels: Iterable[str] = by_route) -> Counter:
            return Counter(f"npu_node_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"npu_node_{name}", text, by_route, buckets=LATENCY, registry=self.registry)

        self.http_requests = counter("http_requests", "HTTP requests by route and status", ("route", "status"))
        self.routes = counter("routes", "Requests by placement and why it was chosen", (*by_route, "reason"))
        self.errors = counter("request_errors", "Requests that failed, by error code", ("code",))
        self.ignored_fields = counter(
            "ignored_fields", "Requests with a field that had no effect; other is any after the first 64", ("field",)
        )
        self.ignored_names: set[str] = set()
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed")
        self.npu_busy = counter(
            "npu_busy_seconds",
            "NPU busy time around requests; exclusive is false for runs in which others are known to have used it too",
            ("model", "emulated", "exclusive"),
        )
        self.joules = counter(
            "energy_joules",
            "Energy used for answers: of the NPU, or of the whole package for CPU and GPU. Models that run together "
            "each count all; exclusive as for busy time",
            (*by_route, "emulated", "exclusive"),
        )
        self.npu_recoveries = Counter(
            "npu_node_npu_recoveries",
            "Recoveries of the NPU that the kernel announced: each aborts the jobs of all processes",
            registry=self.registry,
        )
        self.queue_time = histogram("request_queue_time_seconds", "From submission to the engine's start")
        self.inference_time = histogram("request_inference_time_seconds", "Time on the device")
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the last byte rendered")
        self.loop_lag = Histogram(
            "npu_node_event_loop_lag_seconds",
            "How late the edge's event loop was",
            buckets=_LAG,
            registry=self.registry,
        )
        self.loop_lag_max = Gauge(
            "npu_node_event_loop_lag_max_seconds",
            "The latest that the event loop has been since the node started",
            registry=self.registry,
        )

    def own(self, make: Callable[[CollectorRegistry], M]) -> M:
        """The metrics of one task, created by `make` on first use."""
        if make not in self._own:
            self._own[make] = make(self.registry)
        return cast("M", self._own[make])

    def declare(self, kind: Callable[[CollectorRegistry], OwnMetrics]) -> None:
        """Create the metrics of one task at start, so that they are exported from then on."""
        own = self.own(kind)
        self.made[own.unit] = own.made

    def finished(
        self, route: Route, usage: Usage, timing: Timing, *, busy: Busy = NOT_MEASURED, ran: bool = True
    ) -> None:
        """Count a finished request of any task; `ran`: a device worked on it."""
        by_route = (route.model, route.device)
        self.routes.labels(*by_route, route.reason).inc()
        self.prompt_tokens.labels(*by_route).inc(usage.prompt_tokens)
        if ran:
            self.queue_time.labels(*by_route).observe(max(0.0, timing.queue / 1e3))
            self.inference_time.labels(*by_route).observe(timing.inference / 1e3)
        self.latency.labels(*by_route).observe(timing.total / 1e3)
        # Never true: the counters cannot show that nobody else used the device.
        exclusive = "false" if busy.shared else "unknown"
        if busy.energy.joules is not None:
            self.joules.labels(*by_route, str(route.emulated).lower(), exclusive).inc(busy.energy.joules)
        if busy.us is not None:
            self.npu_busy.labels(route.model, str(route.emulated).lower(), exclusive).inc(max(0, busy.us) / 1e6)

    def failed(self, route: str, error: NodeError) -> None:
        self.errors.labels(error.code).inc()
        self.failures.add(error, route)

    async def watch_event_loop(self) -> None:
        """Measure, until cancelled, how late the loop wakes a sleeper: that is how long something blocked it."""
        worst = 0.0
        while True:
            due = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            lag = max(0.0, time.monotonic() - due)
            worst = max(worst, lag)
            self.loop_lag.observe(lag)
            self.loop_lag_max.set(worst)
