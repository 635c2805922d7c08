"""POST /api/generate and POST /api/chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.api.body import DialectBody, read_body
from worker_node.api.context import request_context, route_headers
from worker_node.api.keep_alive import KeepAlive, keeping, seconds_of
from worker_node.api.keys import NODE
from worker_node.api.leniency import Table
from worker_node.api.middleware import inference
from worker_node.api.ollama.errors import message
from worker_node.api.ollama.frames import Loading, frame
from worker_node.api.ollama.options import Format, OllamaOptions, schema_of
from worker_node.api.ollama.residents import resident, served
from worker_node.api.sse import LineStream
from worker_node.core.errors import BadRequest, NodeError
from worker_node.core.types import Finished, Message, Picture, Rendering, RequestContext, Tool, ToolCall, ToolUse
from worker_node.manager.served import ServedModel
from worker_node.tasks.generate.api.ollama.answers import Chatted, Frames, Generated
from worker_node.tasks.generate.api.ollama.table import CHAT, GENERATE
from worker_node.tasks.generate.api.pictures import picture
from worker_node.tasks.generate.serving.requests import GenerationRequest
from worker_node.tasks.generate.serving.service import GenerationRun, generate


class _Common(DialectBody):
    model: str
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    shift: bool | None = None

    def request(self, context: RequestContext, model: str, **more: Any) -> GenerationRequest:
        """The domain request, for the model of that id. Raises BadRequest."""
        options = self.options or OllamaOptions()
        if self.shift:
            # False is what always happens here: an answer ends where the context does.
            context.note_ignored("shift")
        return GenerationRequest(
            context,
            sampling=options.sampling(),
            model=model,
            grammar=schema_of(self.format),
            think=bool(self.think) if isinstance(self.think, str) else self.think,
            rendering=self._rendering(),
            context_limit=options.num_ctx,
            **more,
        )

    def _rendering(self) -> Rendering:
        """A level of thinking is a variable of the templates that know levels; others think or do not."""
        return Rendering({"reasoning_effort": self.think}) if isinstance(self.think, str) else Rendering()


class GenerateBody(_Common):
    """Body of POST /api/generate."""

    rules: ClassVar[Table] = GENERATE
    takes_images: ClassVar[bool] = True

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaCall(DialectBody):
    """A call that the model made; its arguments are an object."""

    class OllamaCalledFunction(DialectBody):
        """What was called, and with what."""

        name: str
        arguments: dict[str, Any] = Field(default_factory=dict)
        index: int | None = None

    function: OllamaCalledFunction
    type: Literal["function"] | None = None
    id: str | None = None


class OllamaMessage(DialectBody):
    """One turn of a conversation; `images` are base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None


class OllamaTool(DialectBody):
    """A function that the model may ask to be called."""

    class OllamaOfferedFunction(DialectBody):
        """Its name, what it does, and the JSON schema of its arguments."""

        name: Annotated[str, Field(min_length=1, max_length=128)]
        description: str | None = None
        parameters: dict[str, Any] | None = None

    type: Literal["function"] | None = None
    function: OllamaOfferedFunction


class OllamaChatBody(_Common):
    """Body of POST /api/chat."""

    rules: ClassVar[Table] = CHAT
    takes_images: ClassVar[bool] = True

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None
    truncate: bool | None = None

    def tool_use(self) -> ToolUse | None:
        """The tools that the model is told of."""
        tools = tuple(
            Tool(
                tool.function.name,
                tool.function.description or "",
                tool.function.parameters or {"type": "object", "properties": {}},
                f"tools[{index}].function.parameters",
                strict=False,
            )
            for index, tool in enumerate(self.tools or [])
        )
        return ToolUse(tools) if tools else None


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/api/generate", inference(_generate)), web.post("/api/chat", inference(_chat))]


def _conversation(messages: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    return tuple(
        Message(
            turn.role,
            turn.content or "",
            tuple(ToolCall(call.function.name, call.function.arguments) for call in turn.tool_calls or []),
            turn.tool_name,
            _pictures(turn.images, f"messages[{number}].images"),
        )
        for number, turn in enumerate(messages)
    )


def _pictures(images: Sequence[str] | None, where: str) -> tuple[Picture, ...]:
    """Images come before the text, as in Ollama. Raises BadRequest, PayloadTooLarge."""
    return tuple(picture(image, 0, f"{where}[{number}]") for number, image in enumerate(images or ()))


async def _generate(request: web.Request) -> web.StreamResponse:
    context = request_context(request)
    body = await read_body(request, GenerateBody)
    if not body.prompt and not body.images:
        return await _load_or_unload(request, context, body, {"response": ""})
    model = await served(request, body.model)
    prompt: str | tuple[Message, ...] = body.prompt or ""
    if not body.raw:
        system = (Message("system", body.system),) if body.system else ()
        prompt = (*system, Message("user", body.prompt or "", pictures=_pictures(body.images, "images")))
    elif body.images:
        raise BadRequest("images: a raw prompt has no place for them", param="images")
    elif body.system:
        raise BadRequest("system: a raw prompt has no place for it", param="system")
    wanted = body.request(context, model.id, prompt=prompt, split_reasoning=not body.raw)
    return await _answer(request, body, model, wanted, Generated)


async def _chat(request: web.Request) -> web.StreamResponse:
    context = request_context(request)
    body = await read_body(request, OllamaChatBody)
    if not body.messages:
        empty = {"message": {"role": "assistant", "content": ""}}
        return await _load_or_unload(request, context, body, empty)
    model = await served(request, body.model)
    prompt = _conversation(body.messages)
    wanted = body.request(
        context,
        model.id,
        prompt=prompt,
        tool_use=body.tool_use(),
        split_reasoning=True,
        # Ollama's own default.
        drop_oldest=body.truncate is not False,
    )
    return await _answer(request, body, model, wanted, Chatted)


async def _load_or_unload(
    request: web.Request, context: RequestContext, body: _Common, empty: dict[str, Any]
) -> web.StreamResponse:
    """A request that asks for no text loads its model, or unloads it with `keep_alive` 0."""
    manager = request.app[NODE].manager
    reason = "load"
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    if context.dry_run:
        return web.Response()  # no device is chosen for this: who asked for a route is told that there is none
    if seconds == 0:
        reason = "unload"
        manager.unload(await served(request, body.model))
    else:
        model, _ = await resident(request, body.model, context)
        if body.keep_alive is not None:
            manager.keep(model, seconds)
    done = frame(body.model, **empty, done=True, done_reason=reason)
    if body.stream is False:
        return web.Response(body=orjson.dumps(done), content_type="application/json", charset="utf-8")
    async with LineStream(request, {}) as stream:
        await stream.send(done)
    return stream.response


async def _answer(
    request: web.Request, body: _Common, model: ServedModel, wanted: GenerationRequest, form: type[Frames]
) -> web.StreamResponse:
    whole = body.stream is False
    async with (
        keeping(request, model, body.keep_alive),
        generate(request.app[NODE].services, wanted, whole=whole) as run,
    ):
        frames = form(body.model, Loading(run.loading_s))
        if not whole:
            return await _stream(request, run, frames)
        async for event in run.events:
            if isinstance(event, Finished):
                finished = event
            else:
                frames.add(event)
    return web.Response(
        body=orjson.dumps(frames.whole(finished)),
        content_type="application/json",
        charset="utf-8",
        headers=route_headers(run.route, finished.npu_busy_delta_us, shared=finished.npu_busy_shared),
    )


async def _stream(request: web.Request, run: GenerationRun, frames: Frames) -> web.StreamResponse:
    async with LineStream(request, route_headers(run.head())) as stream:
        try:
            async for event in run.events:
                if isinstance(event, Finished):
                    for part in frames.last(event):
                        await stream.send(part)
                elif (piece := frames.piece(event)) is not None:
                    await stream.send(piece)
        except NodeError as error:
            stream.failed(error)
            # The status line is long gone: the error is the last line, and nothing is `done`.
            await stream.send({"error": message(error)})
    return stream.response
