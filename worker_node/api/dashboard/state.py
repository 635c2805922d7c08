"""All that the dashboard shows of one node, as plain data. It holds no word of any request."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from dataclasses import asdict
from typing import Any

import numpy as np

from worker_node.api import health
from worker_node.api.dashboard.events import EventLog
from worker_node.api.dashboard.history import PERIOD_S, History, total
from worker_node.node import Node

FIRST_TOKEN_WINDOW_S = 900.0


def node_state(node: Node, history: History, events: EventLog) -> dict[str, Any]:
    """What /health says, and besides it the history, the routes, the recent failures, the times to first token, the
    events and what each model has made since the start (`made`: tokens, texts, documents or seconds of audio by model).

    `at`, and the times of failures, are Unix times by the node's clock.
    """
    telemetry = node.telemetry
    return {
        "kind": "node",
        "name": socket.gethostname(),
        "at": round(time.time(), 3),
        **health.report(node),
        "in_flight": node.state.in_flight,
        "requests": int(total(telemetry.routes)),
        "recent_requests": history.requests,
        "history": {"period_s": PERIOD_S, **history.series()},
        "first_token_ms": first_token_ms(telemetry.first_tokens, time.monotonic()),
        "routes": _routes(node),
        "made": _made(node),
        "cores": os.cpu_count(),
        "grafana": node.settings.grafana_url,
        "events": events.latest_first(),
        "failures": [asdict(failure) for failure in node.state.failures.latest_first()],
    }


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


def _made(node: Node) -> dict[str, dict[str, int]]:
    made: dict[str, dict[str, int]] = {}
    for what, counter in node.telemetry.made.items():
        for metric in counter.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    counts = made.setdefault(sample.labels["model"], {})
                    counts[what] = counts.get(what, 0) + int(sample.value)
    return made


def _routes(node: Node) -> list[dict[str, Any]]:
    """Finished requests by placement and reason, the most frequent first."""
    routes = [
        {**sample.labels, "count": int(sample.value)}
        for metric in node.telemetry.routes.collect()
        for sample in metric.samples
    ]
    return sorted(routes, key=lambda route: -route["count"])
