"""Metrics of embeddings alone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from worker_node.core.types import Route
from worker_node.observability.metrics import Tally, Telemetry
from worker_node.tasks.embed.serving.requests import EmbeddingReply


class EmbeddingMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def tally(name: str, text: str) -> Tally:
            return Tally(f"npu_node_{name}", text, ("model", "device"), registry)

        self.texts = tally("embedded_texts", "Texts embedded")
        self.device_tokens = tally("embedding_device_tokens", "Tokens computed for embeddings, padding included")
        self.computed_tokens = tally(
            "embedding_computed_tokens", "Tokens of the texts computed for embeddings, without padding"
        )
        self.cache_hits = tally("embedding_cache_hits", "Texts whose vector was in the cache")
        self.cache_misses = tally("embedding_cache_misses", "Texts whose vector was not")


def declare_embedding_metrics(telemetry: Telemetry) -> None:
    """Create the metrics at start, so that they are exported from then on."""
    telemetry.made["texts"] = telemetry.own(EmbeddingMetrics).texts


def count_cached(telemetry: Telemetry, route: Route, hits: int, misses: int) -> None:
    """Count texts by whether the cache had them."""
    own = telemetry.own(EmbeddingMetrics)
    own.cache_hits.add(hits, route.model, route.device)
    own.cache_misses.add(misses, route.model, route.device)


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
    own, model, device = telemetry.own(EmbeddingMetrics), reply.route.model, reply.route.device
    own.texts.add(len(reply.vectors), model, device)
    if reply.device_tokens is not None:
        own.device_tokens.add(reply.device_tokens, model, device)
        own.computed_tokens.add(reply.computed_tokens, model, device)
