"""Metrics of generations and of the images in chats."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from worker_node.observability.metrics import LATENCY

_TOKEN_LATENCY = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class GenerationMetrics:
    unit = "tokens"

    def __init__(self, registry: CollectorRegistry) -> None:
        by_route = ("model", "device")
        self.made = self.tokens = Counter("npu_node_generation_tokens", "Tokens generated", by_route, registry=registry)
        self.first_token = Histogram(
            "npu_node_time_to_first_token_seconds",
            "From arrival to the first token",
            by_route,
            buckets=LATENCY,
            registry=registry,
        )
        self.inter_token = Histogram(
            "npu_node_inter_token_latency_seconds",
            "Mean time between a request's tokens",
            by_route,
            buckets=_TOKEN_LATENCY,
            registry=registry,
        )
        self._images = Counter(
            "npu_node_images",
            "Images of chats; the outcome is decoded or the code of the error",
            ("model", "outcome"),
            registry=registry,
        )
        self._image_bytes = Counter(
            "npu_node_image_bytes", "Bytes of the image files that were decoded", ("model",), registry=registry
        )

    def count_image(self, model: str, size: int, refusal: str | None) -> None:
        self._images.labels(model, refusal or "decoded").inc(1)
        if refusal is None:
            self._image_bytes.labels(model).inc(size)
