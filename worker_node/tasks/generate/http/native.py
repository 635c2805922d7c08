"""The native dialect: POST /inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import Field

from worker_node.core.errors import NodeError
from worker_node.core.types import RequestContext
from worker_node.http.body import Body, OneOrMany
from worker_node.http.context import busy_fields, timing_ms
from worker_node.http.replies import Reply, describe
from worker_node.http.sse import event_frame
from worker_node.tasks.generate.blocks import Event, Finished, Grown
from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.parameters import Length, Temperature
from worker_node.tasks.generate.http.replies import ParsedRequest, Renderer, generation_route
from worker_node.tasks.generate.request import GenerationRequest, Message
from worker_node.tasks.generate.service import Choices


class InferenceBody(Body):
    prompt: str
    model: str | None = None
    max_new_tokens: Length | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], OneOrMany, Field(max_length=16)] = Field(
        default_factory=list
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    raw: bool = False


async def _parse(_: web.Request, context: RequestContext, body: InferenceBody) -> ParsedRequest:
    sampling = parameters.sampling({name: getattr(body, name) for name in body.model_fields_set})
    prompt = body.prompt if body.raw else (Message("user", body.prompt),)
    return ParsedRequest([GenerationRequest(context, prompt, sampling, body.model)], _Native, body.stream)


class _Native(Renderer):
    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def event(self, event: Event, *_: int) -> bytes:
        if isinstance(event, Grown):
            return event_frame({"text": event.text}, "token")
        return event_frame(self._done(event), "done") if isinstance(event, Finished) else b""

    def failure(self, error: NodeError) -> bytes:
        return event_frame({"error": describe(error)}, "error")

    def whole(self, ends: Sequence[Finished]) -> dict[str, Any]:
        return {"text": ends[0].text(), **self._done(ends[0])}

    def _done(self, finished: Finished) -> dict[str, Any]:
        route = self._choices.runs[0].execution.route
        done: dict[str, Any] = {
            "model": route.model,
            "device": route.device,
            "finish_reason": finished.finish_reason,
            "usage": {
                "prompt_tokens": finished.usage.prompt_tokens,
                "completion_tokens": finished.usage.completion_tokens,
                "cached_tokens": finished.usage.cached_tokens,
            },
            "timing_ms": {
                **timing_ms(finished.timing, "queue", "tokenize", "first_token"),
                **timing_ms(finished.timing, "total"),
                "generate": round(finished.timing.inference, 3),
            },
            **busy_fields(finished.busy, whole=True),
        }
        if route.emulated:
            done["emulated"] = True
        return done


class Inference(Reply):
    model: str
    device: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: dict[str, int | None]
    timing_ms: dict[str, float | None]
    npu_busy_delta_us: int | None
    joules: float | None


OPERATIONS = (generation_route("/inference", _parse, "Generate text", Inference, InferenceBody),)
