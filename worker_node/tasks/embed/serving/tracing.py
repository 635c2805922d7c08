"""The trace of an embedding: its name and what was asked of it, in the words of GenAI's semantic conventions."""

from __future__ import annotations

from contextlib import AbstractContextManager

from worker_node.observability.tracing import Operation, Tracing
from worker_node.tasks.embed.serving.requests import EmbeddingRequest


def trace_embedding(tracing: Tracing, request: EmbeddingRequest) -> AbstractContextManager[Operation]:
    """Trace the embedding that runs while the block does."""
    return tracing.operation("embeddings", request.context, {"npu.texts": len(request.texts)})
