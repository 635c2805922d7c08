"""The native dialect: POST /embeddings and POST /inference (spec: node-api)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from aiohttp import web
from pydantic import BeforeValidator, Field

from worker_node.api import parameters
from worker_node.api.body import Body, read_body
from worker_node.api.context import embedding_headers, request_context, route_headers
from worker_node.api.errors import describe
from worker_node.api.keys import NODE
from worker_node.api.middleware import inference
from worker_node.api.sse import EventStream
from worker_node.api.vectors import rows_json
from worker_node.domain import (
    EmbeddingReply,
    EmbeddingRequest,
    Finished,
    GenerationRequest,
    Message,
    Route,
    Timing,
    Token,
)
from worker_node.errors import BadRequest, NodeError
from worker_node.serving.embedding import embed
from worker_node.serving.generation import GenerationRun, generate

OneOrMany = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class EmbeddingsBody(Body):
    """Body of POST /embeddings."""

    texts: Annotated[list[str], OneOrMany]
    model: str | None = None
    truncate: bool = False
    input_type: Annotated[str, Field(max_length=64)] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class InferenceBody(Body):
    """Body of POST /inference."""

    prompt: str
    model: str | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], OneOrMany, Field(max_length=16)] = Field(
        default_factory=list
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    raw: bool = False


def routes() -> list[web.RouteDef]:
    """The routes of this dialect."""
    return [*embedding_routes(), *generation_routes()]


def embedding_routes() -> list[web.RouteDef]:
    """Those that embed texts."""
    return [web.post("/embeddings", inference(_embeddings))]


def generation_routes() -> list[web.RouteDef]:
    """Those that generate text."""
    return [web.post("/inference", inference(_inference))]


async def _embeddings(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    context = request_context(request)
    body = await read_body(request, EmbeddingsBody)
    if len(body.texts) > node.settings.max_texts:
        raise BadRequest(
            f"{len(body.texts)} texts in one request; at most {node.settings.max_texts} are taken",
            param="texts",
        )
    wanted = EmbeddingRequest(
        context,
        tuple(body.texts),
        body.model,
        truncate=body.truncate,
        input_type=body.input_type,
        dimensions=body.dimensions,
    )
    reply = await embed(node.services, wanted)
    headers = embedding_headers(reply)
    if "application/octet-stream" in request.headers.get("Accept", ""):
        count, dimensions = reply.vectors.shape
        return web.Response(
            body=reply.vectors.astype("<f4", copy=False).tobytes(),
            content_type="application/octet-stream",
            headers=headers | {"X-Shape": f"{count},{dimensions}"},
        )
    content = b"".join([part async for part in _embeddings_json(reply)])
    return web.Response(body=content, content_type="application/json", charset="utf-8", headers=headers)


async def _embeddings_json(reply: EmbeddingReply) -> AsyncIterator[bytes]:
    """Render the reply in pieces, so that a large one does not hold up the event loop."""
    head: dict[str, Any] = {
        "model": reply.route.model,
        "device": reply.route.device,
        "dimensions": reply.vectors.shape[1],
        "space": reply.space,
        "usage": {"prompt_tokens": reply.usage.prompt_tokens},
        "timing_ms": _timing(reply.timing, "queue", "tokenize", "inference", "total"),
        "npu_busy_delta_us": reply.npu_busy_delta_us,
    }
    if reply.npu_busy_shared:
        head["npu_busy_exclusive"] = False
    if reply.route.emulated:
        head["emulated"] = True
    yield orjson.dumps(head)[:-1] + b',"embeddings":['
    async for rows in rows_json(reply.vectors):
        yield rows
    yield b"]}"


async def _inference(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    context = request_context(request)
    body = await read_body(request, InferenceBody)
    sampling = parameters.sampling(parameters.NATIVE, body.model_dump(exclude_unset=True))
    prompt = body.prompt if body.raw else (Message("user", body.prompt),)
    wanted = GenerationRequest(context, prompt, sampling, body.model)
    async with generate(node.services, wanted, whole=not body.stream) as run:
        if body.stream:
            return await _stream(request, run)
        text: list[str] = []
        finished: Finished | None = None
        async for event in run.events:
            if isinstance(event, Token):
                text.append(event.text)
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None  # noqa: S101  (the last event, else an error was raised)
    return web.Response(
        body=orjson.dumps({"text": "".join(text), **_done(run.route, finished)}),
        content_type="application/json",
        charset="utf-8",
        headers=route_headers(run.route, finished.npu_busy_delta_us, shared=finished.npu_busy_shared),
    )


async def _stream(request: web.Request, run: GenerationRun) -> web.StreamResponse:
    async with EventStream(request, route_headers(run.head())) as stream:
        try:
            async for event in run.events:
                if isinstance(event, Token):
                    await stream.send({"text": event.text}, "token")
                elif isinstance(event, Finished):
                    await stream.send(_done(run.route, event), "done")
        except NodeError as error:
            stream.failed(error)
            # The status line is long gone: the error is the last event, and there is no `done`.
            await stream.send({"error": describe(error)}, "error")
    return stream.response


def _done(route: Route, finished: Finished) -> dict[str, Any]:
    done: dict[str, Any] = {
        "model": route.model,
        "device": route.device,
        "finish_reason": finished.finish_reason,
        "usage": {
            "prompt_tokens": finished.usage.prompt_tokens,
            "completion_tokens": finished.usage.completion_tokens,
        },
        "timing_ms": {
            **_timing(finished.timing, "queue", "tokenize", "first_token"),
            **_timing(finished.timing, "total"),
            "generate": round(finished.timing.inference, 3),
        },
        "npu_busy_delta_us": finished.npu_busy_delta_us,
    }
    if finished.npu_busy_shared:
        done["npu_busy_exclusive"] = False
    if route.emulated:
        done["emulated"] = True
    return done


def _timing(timing: Timing, *stages: str) -> dict[str, float | None]:
    values = {stage: getattr(timing, stage) for stage in stages}
    return {stage: None if value is None else round(value, 3) for stage, value in values.items()}
