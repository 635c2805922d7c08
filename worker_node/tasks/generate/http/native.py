"""The native dialect: POST /inference (spec: node-api)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import Field

from worker_node.core.errors import NodeError
from worker_node.core.types import Finished, Message, Route, Token
from worker_node.http import parameters
from worker_node.http.body import Body, OneOrMany, read_body
from worker_node.http.context import request_context, route_headers, timing_ms
from worker_node.http.errors import describe
from worker_node.http.middleware import inference
from worker_node.http.replies import Reply
from worker_node.http.request_state import NODE
from worker_node.http.sse import EventStream
from worker_node.tasks.generate.http.replies import json_response
from worker_node.tasks.generate.model import GenerationRequest
from worker_node.tasks.generate.service import GenerationRun, generate


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
    return [web.post("/inference", inference(_inference))]


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
    return json_response({"text": "".join(text), **_done(run.route, finished)}, run.route, [finished])


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
            # The status line was sent long ago: the error is the last event, and there is no `done`.
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
            **timing_ms(finished.timing, "queue", "tokenize", "first_token"),
            **timing_ms(finished.timing, "total"),
            "generate": round(finished.timing.inference, 3),
        },
        "npu_busy_delta_us": finished.npu_busy_delta_us,
    }
    if finished.npu_busy_shared:
        done["npu_busy_exclusive"] = False
    if route.emulated:
        done["emulated"] = True
    return done


class Inference(Reply):
    """POST /inference."""

    model: str
    device: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: dict[str, int]
    timing_ms: dict[str, float | None]
    npu_busy_delta_us: int | None
