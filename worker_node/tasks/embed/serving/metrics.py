"""What only embedding counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from worker_node.domain import Route
from worker_node.tasks.embed.serving.requests import EmbeddingReply
from worker_node.telemetry import Telemetry


class EmbeddingMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"npu_node_{name}", text, ("model", "device"), registry=registry)

        self.texts = counter("embedded_texts", "Texts embedded")
        self.device_tokens = counter("embedding_device_tokens", "Tokens computed for embeddings, padding included")
        self.computed_tokens = counter(
            "embedding_computed_tokens", "Tokens of the texts computed for embeddings, without padding"
        )
        self.cache_hits = counter("embedding_cache_hits", "Texts whose vector was in the cache")
        self.cache_misses = counter("embedding_cache_misses", "Texts whose vector was not")


def declare_embedding_metrics(telemetry: Telemetry) -> None:
    """Have the metrics there from the start."""
    telemetry.made["texts"] = telemetry.own(EmbeddingMetrics).texts


def count_cached(telemetry: Telemetry, route: Route, hits: int, misses: int) -> None:
    """Count texts by whether the cache had them."""
    own, labels = telemetry.own(EmbeddingMetrics), (route.model, route.device.value)
    telemetry.of(own.cache_hits, *labels).inc(hits)
    telemetry.of(own.cache_misses, *labels).inc(misses)


def count_embedding(telemetry: Telemetry, reply: EmbeddingReply) -> None:
    """Count a finished request."""
    telemetry.finished(
        reply.route,
        reply.usage,
        reply.timing,
        busy_us=reply.npu_busy_delta_us,
        busy_shared=reply.npu_busy_shared,
        ran=reply.cached != "hit",
    )
    own, labels = telemetry.own(EmbeddingMetrics), (reply.route.model, reply.route.device.value)
    telemetry.of(own.texts, *labels).inc(len(reply.vectors))
    if reply.device_tokens is not None:
        telemetry.of(own.device_tokens, *labels).inc(reply.device_tokens)
        telemetry.of(own.computed_tokens, *labels).inc(reply.computed_tokens)
