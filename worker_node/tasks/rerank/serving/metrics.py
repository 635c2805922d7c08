"""What only reranking counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from worker_node.tasks.rerank.serving.model import RerankReply
from worker_node.telemetry import Telemetry


class RerankMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"npu_node_{name}", text, ("model", "device"), registry=registry)

        self.documents = counter("reranked_documents", "Documents scored")
        self._device_tokens = counter("rerank_device_tokens", "Tokens computed for reranking, padding included")
        self._tokens = counter("rerank_computed_tokens", "Tokens of the pairs computed for reranking, without padding")

    def reranked(self, reply: RerankReply) -> None:
        """Count a finished request."""
        labels = (reply.route.model, reply.route.device.value)
        self.documents.labels(*labels).inc(len(reply.logits))
        if reply.device_tokens is not None:
            self._device_tokens.labels(*labels).inc(reply.device_tokens)
            self._tokens.labels(*labels).inc(reply.usage.prompt_tokens)


def declare_rerank_metrics(telemetry: Telemetry) -> None:
    """Have the metrics there from the start."""
    telemetry.made["documents"] = telemetry.own(RerankMetrics).documents
