"""Metrics of generations alone."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from worker_node.core.types import Finished, Route
from worker_node.observability.metrics import LATENCY, Distribution, Tally, Telemetry
from worker_node.tasks.generate.serving.picture_metrics import PictureMetrics

_TOKEN_LATENCY = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class GenerationMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_route = ("model", "device")
        self.tokens = Tally("npu_node_generation_tokens", "Tokens generated", by_route, registry)
        self.first_token = Distribution(
            "npu_node_time_to_first_token_seconds", "From arrival to the first token", by_route, LATENCY, registry
        )
        self.inter_token = Distribution(
            "npu_node_inter_token_latency_seconds",
            "Mean time between a request's tokens",
            by_route,
            _TOKEN_LATENCY,
            registry,
        )


def declare_generation_metrics(telemetry: Telemetry) -> None:
    """Create the metrics at start, so that they are exported from then on."""
    telemetry.made["tokens"] = telemetry.own(GenerationMetrics).tokens
    telemetry.own(PictureMetrics)


def token_counter(telemetry: Telemetry, route: Route) -> Callable[[int], None]:
    """Counts tokens as they are generated: an answer may take minutes, and its caller may leave before."""
    tokens, model, device = telemetry.own(GenerationMetrics).tokens, route.model, route.device

    def count(more: int) -> None:
        tokens.add(more, model, device)

    return count


def count_generation(telemetry: Telemetry, route: Route, finished: Finished) -> None:
    """Count a finished generation; its tokens were counted as they came."""
    timing, tokens = finished.timing, finished.usage.completion_tokens
    telemetry.finished(
        route, finished.usage, timing, busy_us=finished.npu_busy_delta_us, busy_shared=finished.npu_busy_shared
    )
    if timing.first_token is None:
        return
    own = telemetry.own(GenerationMetrics)
    own.first_token.observe(timing.first_token / 1e3, route.model, route.device)
    telemetry.first_tokens.append((time.monotonic(), timing.first_token / 1e3))
    if tokens > 1:
        between = (timing.total - timing.first_token) / 1e3 / (tokens - 1)
        own.inter_token.observe(between, route.model, route.device)
