"""Metrics of reranking alone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from worker_node.observability.metrics import Tally, Telemetry
from worker_node.tasks.rerank.serving.model import RerankReply


class RerankMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def tally(name: str, text: str) -> Tally:
            return Tally(f"npu_node_{name}", text, ("model", "device"), registry)

        self.documents = tally("reranked_documents", "Documents scored")
        self._device_tokens = tally("rerank_device_tokens", "Tokens computed for reranking, padding included")
        self._tokens = tally("rerank_computed_tokens", "Tokens of the pairs computed for reranking, without padding")

    def reranked(self, reply: RerankReply) -> None:
        """Count a finished request."""
        labels = (reply.route.model, reply.route.device)
        self.documents.add(len(reply.logits), *labels)
        if reply.device_tokens is not None:
            self._device_tokens.add(reply.device_tokens, *labels)
            self._tokens.add(reply.usage.prompt_tokens, *labels)


def declare_rerank_metrics(telemetry: Telemetry) -> None:
    """Create the metrics at start, so that they are exported from then on."""
    telemetry.made["documents"] = telemetry.own(RerankMetrics).documents
