"""The routes that generate text, in every dialect."""

from __future__ import annotations

from aiohttp import web

from worker_node.api import native
from worker_node.api.ollama import generation as ollama
from worker_node.api.openai import chat, completions, responses, responses_stored, tokenize
from worker_node.api.task import TaskApi


def _routes() -> list[web.RouteDef]:
    openai = (tokenize, completions, chat, responses, responses_stored)
    return [
        *native.routes(),
        *(route for dialect in openai for route in dialect.routes()),
        *ollama.routes(),
    ]


API = TaskApi(routes=_routes)
