"""The HTTP side of the task: its routes in every dialect, how they are described, what they need beside the node."""

from __future__ import annotations

from aiohttp import web

from worker_node.http.task import EVENTS, JSON, LINES, ApiOperation, TaskApi
from worker_node.node import Node
from worker_node.tasks.generate.http import native, ollama, openai, responses, tokenize
from worker_node.tasks.generate.http.fields import TABLES as OPENAI_TABLES
from worker_node.tasks.generate.http.ollama import TABLES as OLLAMA_TABLES
from worker_node.tasks.generate.http.remote_images import fetch_remote_images
from worker_node.tasks.generate.http.response_store import ResponseStore, StoreLimits
from worker_node.tasks.generate.http.responses_body import ResponsesBody
from worker_node.tasks.generate.metrics import declare_generation_metrics


def _routes() -> list[web.RouteDef]:
    return [route for module in (native, tokenize, openai, responses, ollama) for route in module.routes()]


def _prepare(app: web.Application, node: Node) -> None:
    """Give the application what the routes of stored responses need, and have remote images fetched."""
    settings = node.settings
    limits = StoreLimits(settings.stored_responses, settings.stored_response_bytes, settings.stored_response_s)
    app[responses.RESPONSES] = ResponseStore(limits)
    app.cleanup_ctx.append(responses.forget_expired)
    fetch_remote_images(node)


API = TaskApi(
    routes=_routes,
    operations=(
        ApiOperation(
            "post",
            "/inference",
            "Generate text",
            {JSON: native.Inference, EVENTS: None},
            native.InferenceBody,
            inference=True,
        ),
        ApiOperation(
            "post",
            "/v1/completions",
            "OpenAI: continue text",
            {JSON: openai.Completion, EVENTS: None},
            openai.CompletionsBody,
            inference=True,
        ),
        ApiOperation(
            "post",
            "/v1/chat/completions",
            "OpenAI: answer a conversation",
            {JSON: openai.ChatCompletion, EVENTS: None},
            openai.ChatBody,
            inference=True,
        ),
        ApiOperation(
            "post",
            "/v1/responses",
            "OpenAI: answer, stored for later turns",
            {JSON: responses.OpenAIResponse, EVENTS: None},
            ResponsesBody,
            inference=True,
        ),
        ApiOperation("get", "/v1/responses/{id}", "OpenAI: a stored response", {JSON: responses.OpenAIResponse}),
        ApiOperation("delete", "/v1/responses/{id}", "OpenAI: forget a response", {JSON: responses.OpenAIDeleted}),
        ApiOperation("get", "/v1/responses/{id}/input_items", "OpenAI: its input", {JSON: responses.OpenAIItems}),
        ApiOperation("post", "/v1/responses/{id}/cancel", "OpenAI: refused, none is in the background", {JSON: None}),
        ApiOperation(
            "post", "/tokenize", "vLLM: tokens of a prompt", {JSON: tokenize.Tokenized}, tokenize.TokenizeBody
        ),
        ApiOperation(
            "post", "/detokenize", "vLLM: text of tokens", {JSON: tokenize.Detokenized}, tokenize.DetokenizeBody
        ),
        ApiOperation(
            "post",
            "/api/generate",
            "Ollama: continue a prompt",
            {JSON: ollama.OllamaFrame, LINES: None},
            ollama.GenerateBody,
            inference=True,
        ),
        ApiOperation(
            "post",
            "/api/chat",
            "Ollama: answer a conversation",
            {JSON: ollama.OllamaFrame, LINES: None},
            ollama.OllamaChatBody,
            inference=True,
        ),
    ),
    fields=frozenset(name for table in (*OPENAI_TABLES, *OLLAMA_TABLES) for name in table) | {"top_logprobs"},
    prepare=_prepare,
    metrics=declare_generation_metrics,
)
