"""The HTTP side of the task: its routes in every dialect, and how they are described."""

from __future__ import annotations

from aiohttp import web

from worker_node.api.operation import BINARY, JSON, ApiOperation
from worker_node.api.task import TaskApi
from worker_node.tasks.embed.api import native, ollama, openai, replies
from worker_node.tasks.embed.serving.metrics import declare_embedding_metrics


def _routes() -> list[web.RouteDef]:
    return [*native.routes(), *openai.routes(), *ollama.routes()]


API = TaskApi(
    routes=_routes,
    operations=(
        ApiOperation(
            "post",
            "/embeddings",
            "Embed texts",
            {JSON: replies.Embeddings, BINARY: None},
            native.EmbeddingsBody,
            inference=True,
        ),
        ApiOperation(
            "post",
            "/v1/embeddings",
            "OpenAI: embed",
            {JSON: replies.OpenAIEmbeddings},
            openai.OpenAIEmbeddingsBody,
            inference=True,
        ),
        ApiOperation(
            "post", "/api/embed", "Ollama: embed", {JSON: replies.OllamaEmbed}, ollama.EmbedBody, inference=True
        ),
        ApiOperation(
            "post",
            "/api/embeddings",
            "Ollama: embed one text",
            {JSON: replies.OllamaEmbedding},
            ollama.OllamaEmbeddingsBody,
            inference=True,
        ),
    ),
    fields=frozenset(openai.EMBEDDINGS),
    metrics=declare_embedding_metrics,
)
