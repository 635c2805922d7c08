"""The routes that embed texts, in every dialect."""

from __future__ import annotations

from aiohttp import web

from worker_node.api import native
from worker_node.api.ollama import embeddings as ollama
from worker_node.api.openai import embeddings as openai
from worker_node.api.task import TaskApi


def _routes() -> list[web.RouteDef]:
    return [*native.embedding_routes(), *openai.routes(), *ollama.routes()]


API = TaskApi(routes=_routes)
