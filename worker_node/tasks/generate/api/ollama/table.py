"""The fields of Ollama's generation routes that this node does not implement."""

from __future__ import annotations

from worker_node.api.leniency import Table, Unsupported, hints

GENERATE: Table = {
    **hints("truncate"),
    "context": Unsupported("earlier tokens cannot be handed back; use /api/chat with the earlier messages"),
    "logprobs": Unsupported("use /v1/completions"),
    "suffix": Unsupported("text cannot be filled in before a suffix: the models here only continue a prompt"),
    "template": Unsupported("the model's own template cannot be replaced; send raw: true and a finished prompt"),
    "top_logprobs": Unsupported("use /v1/completions"),
}

CHAT: Table = {
    "logprobs": Unsupported("use /v1/chat/completions"),
    "top_logprobs": Unsupported("use /v1/chat/completions"),
}

TABLES = (GENERATE, CHAT)
