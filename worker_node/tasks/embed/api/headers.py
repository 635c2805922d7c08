"""The headers of a reply with vectors."""

from __future__ import annotations

from worker_node.api.context import route_headers
from worker_node.tasks.embed.serving.requests import EmbeddingReply


def embedding_headers(reply: EmbeddingReply) -> dict[str, str]:
    """The headers of every embedding reply: its route and cost, its vector space, and whether the cache had it."""
    headers = route_headers(reply.route, reply.npu_busy_delta_us, shared=reply.npu_busy_shared)
    headers["X-Space"] = reply.space
    if reply.cached is not None:
        headers["X-NPU-Node-Cache"] = reply.cached
    return headers
