"""Ollama's POST /api/generate and /api/chat: the answer in frames, one for each piece, or as one whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from aiohttp import web
from pydantic import Field

from worker_node.core.errors import BadRequest, NodeError
from worker_node.core.types import RequestContext
from worker_node.http.body import DialectBody, limited, read_body
from worker_node.http.context import busy_fields, request_context
from worker_node.http.errors import message
from worker_node.http.leniency import OPTIONS, Table, Unsupported
from worker_node.http.ollama import (
    KeepAlive,
    keeping,
    seconds_of,
    served,
)
from worker_node.http.replies import Reply, json_response
from worker_node.http.request_state import NODE
from worker_node.http.sse import LineStream, line
from worker_node.http.task import JSON, LINES, ApiOperation
from worker_node.manager.served import ServedModel
from worker_node.tasks.generate.answer import Block, BlockKind, Closed, Finished, FinishReason, Grown, TokenLogprob
from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.conversation import FunctionFields, past_arguments, tool_of
from worker_node.tasks.generate.http.parameters import RepetitionPenalty, SamplingBody
from worker_node.tasks.generate.http.replies import (
    Ask,
    Renderer,
    answering,
    chat_logprobs,
    known_alternatives,
)
from worker_node.tasks.generate.images import image_of_base64
from worker_node.tasks.generate.messages import Sampling
from worker_node.tasks.generate.request import (
    AnswerSchema,
    GenerationRequest,
    Image,
    Message,
    Rendering,
    ToolCall,
    ToolUse,
)
from worker_node.tasks.generate.service import ChoiceEvent, Choices


def now() -> str:
    """The time as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def frame(model: str, **fields: Any) -> dict[str, Any]:
    """A frame; `model` is the name that the client used."""
    return {"model": model, "created_at": now(), **fields}


class Frames(Renderer):
    """Renders one answer. `model` is the name that the client used.

    `top_logprobs` is how many alternatives each token has; None where log probabilities were not asked for.
    """

    frames = LineStream

    def __init__(self, model: str, top_logprobs: int | None, choices: Choices) -> None:
        self._model = model
        self._top = top_logprobs
        self._run = choices.runs[0]

    @abstractmethod
    def _fields(self, text: str, thinking: str, calls: Sequence[Block]) -> dict[str, Any]:
        """The fields that hold a part of the answer."""

    def event(self, event: ChoiceEvent) -> bytes:
        """A call makes a frame when it is complete."""
        match event.event:
            case Grown(block, text, logprobs) if block.kind is not BlockKind.CALL:
                said = (text, "") if block.kind is BlockKind.TEXT else ("", text)
                part = self._fields(*said, []) | {"done": False} | self._logprobs(logprobs)
                return line(frame(self._model, **part))
            case Closed(block) if block.kind is BlockKind.CALL and not block.cut:
                return line(frame(self._model, **self._fields("", "", [block]), done=False))
            case Finished() as finished:
                return line(self._last(finished, "", "", []))
        return b""

    def failure(self, error: NodeError) -> bytes:
        return line({"error": message(error)})

    def whole(self, ends: Sequence[Finished]) -> dict[str, Any]:
        [finished] = ends
        last = self._last(finished, finished.text(), finished.text(BlockKind.REASONING), finished.calls)
        return last | self._logprobs(finished.logprobs)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(tokens, self._top)["content"]} if tokens and self._top is not None else {}

    def _last(self, finished: Finished, text: str, thinking: str, calls: Sequence[Block]) -> dict[str, Any]:
        facts = {**_ending(finished, self._run.loading_s), "device": str(self._run.route.device)}
        return frame(self._model, **self._fields(text, thinking, calls), **facts)


class Generated(Frames):
    """Frames of /api/generate."""

    def _fields(self, text: str, thinking: str, calls: Sequence[Block]) -> dict[str, Any]:  # noqa: ARG002
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class Chatted(Frames):
    """Frames of /api/chat."""

    def _fields(self, text: str, thinking: str, calls: Sequence[Block]) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            turn["thinking"] = thinking
        if calls:
            turn["tool_calls"] = [
                {"function": {"name": call.name, "arguments": past_arguments(call.text)}} for call in calls
            ]
        return {"message": turn}


_NS_PER_MS = 1e6


def _ending(finished: Finished, loading_s: float) -> dict[str, Any]:
    """The fields of the last frame, after a wait of `loading_s` seconds for the model to be loaded.

    Reading the prompt lasts from the start in the engine to the first token, writing from there to the end.
    """
    timing = finished.timing
    started = timing.total - timing.inference
    reading = timing.inference if timing.first_token is None else max(0.0, timing.first_token - started)
    return {
        "done": True,
        "done_reason": "length" if finished.finish_reason is FinishReason.LENGTH else "stop",
        "total_duration": round(timing.total * _NS_PER_MS),
        "load_duration": round(loading_s * 1e9),
        "prompt_eval_count": finished.usage.prompt_tokens,
        "prompt_eval_duration": round(reading * _NS_PER_MS),
        "eval_count": finished.usage.completion_tokens,
        "eval_duration": round(max(0.0, timing.inference - reading) * _NS_PER_MS),
        **busy_fields(finished.busy),
    }


# The fields of Ollama's generation routes that this node does not implement.

GENERATE: Table = {
    "context": Unsupported("earlier tokens cannot be handed back; use /api/chat with the earlier messages"),
    "suffix": Unsupported("text cannot be filled in before a suffix: the models here only continue a prompt"),
    "template": Unsupported("the model's own template cannot be replaced; send raw: true and a finished prompt"),
}


Format = Literal["", "json"] | dict[str, Any]


class OllamaOptions(SamplingBody):
    """Sampling options. Those on memory and threads, which this node uses in its own way, change no answer.

    Clients send Ollama's defaults along: a refused option at its default is passed over.
    """

    rules: ClassVar[Table] = OPTIONS

    num_predict: Annotated[int, Field(ge=-2, le=1_000_000)] | None = None
    num_ctx: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None

    def sampling(self, *, logprobs: bool) -> Sampling:
        """How to sample. Raises BadRequest."""
        defaults = parameters.OLLAMA_DEFAULTS
        return parameters.sampling(parameters.OLLAMA, self.model_dump(), dialect_defaults=defaults, logprobs=logprobs)


def schema_of(wanted: Format | None) -> AnswerSchema | None:
    """What the answer must match."""
    if not wanted:
        return None
    # Ollama passes over what it cannot enforce, and has no word for strict.
    return AnswerSchema({"type": "object"} if isinstance(wanted, str) else wanted, "format", strict=False)


class _Common(DialectBody):
    model: str
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def request(self, context: RequestContext, model: str, **more: Any) -> GenerationRequest:
        """The domain request, for the model of that id. Raises BadRequest."""
        options = self.options or OllamaOptions()
        if self.shift:
            # False is what always happens here: an answer ends where the context does.
            context.note_ignored("shift")
        return GenerationRequest(
            context,
            sampling=options.sampling(logprobs=bool(self.logprobs)),
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

    class OllamaOfferedFunction(FunctionFields):
        name: Annotated[str, Field(min_length=1, max_length=128)]

    type: Literal["function"] | None = None
    function: OllamaOfferedFunction


class OllamaChatBody(_Common):
    """Body of POST /api/chat."""

    takes_images: ClassVar[bool] = True

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None
    truncate: bool | None = None

    def tool_use(self) -> ToolUse | None:
        """The tools that the model may call."""
        tools = tuple(
            tool_of(tool.function, f"tools[{index}].function", strict=False)
            for index, tool in enumerate(self.tools or [])
        )
        return ToolUse(tools) if tools else None


def _conversation(messages: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    return tuple(
        Message(
            turn.role,
            turn.content or "",
            tuple(ToolCall(call.function.name, call.function.arguments) for call in turn.tool_calls or []),
            turn.tool_name,
            _images(turn.images, f"messages[{number}].images"),
        )
        for number, turn in enumerate(messages)
    )


def _images(images: Sequence[str] | None, where: str) -> tuple[Image, ...]:
    """Images come before the text, as in Ollama. Raises BadRequest, PayloadTooLarge."""
    return tuple(image_of_base64(image, 0, f"{where}[{number}]") for number, image in enumerate(images or ()))


async def _generate(request: web.Request) -> Ask | web.StreamResponse:
    context = request_context(request)
    body = await read_body(request, GenerateBody)
    if not body.prompt and not body.images:
        return await _load_or_unload(request, context, body, {"response": ""})
    model = await served(request, body.model)
    prompt: str | tuple[Message, ...] = body.prompt or ""
    if not body.raw:
        system = (Message("system", body.system),) if body.system else ()
        prompt = (*system, Message("user", body.prompt or "", images=_images(body.images, "images")))
    elif body.images:
        raise BadRequest("images: a raw prompt has no place for them", param="images")
    elif body.system:
        raise BadRequest("system: a raw prompt has no place for it", param="system")
    wanted = body.request(context, model.id, prompt=prompt, split_reasoning=not body.raw)
    return _ask(request, body, model, wanted, Generated)


async def _chat(request: web.Request) -> Ask | web.StreamResponse:
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
    return _ask(request, body, model, wanted, Chatted)


async def _load_or_unload(
    request: web.Request, context: RequestContext, body: _Common, empty: dict[str, Any]
) -> web.StreamResponse:
    """A request that asks for no text loads its model, or unloads it with `keep_alive` 0."""
    manager = request.app[NODE].manager
    reason = "load"
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    if seconds == 0:
        reason = "unload"
        manager.unload(await served(request, body.model))
    else:
        model = await served(request, body.model)
        await manager.load(model, context.deadline)
        if body.keep_alive is not None:
            manager.keep(model, seconds)
    done = frame(body.model, **empty, done=True, done_reason=reason)
    if body.stream is False:
        return json_response(done)
    async with LineStream(request, {}) as stream:
        await stream.send(done)
    return stream.response


def _ask(request: web.Request, body: _Common, model: ServedModel, wanted: GenerationRequest, form: type[Frames]) -> Ask:
    kept = keeping(request, model, body.keep_alive)
    top = None
    if body.logprobs:
        sampling = wanted.sampling
        given = "temperature" not in sampling.open_fields
        known = known_alternatives(sampling.temperature if given else parameters.OLLAMA_DEFAULTS["temperature"])
        top = limited(request, "top_logprobs", body.top_logprobs or 0, known)
    elif body.top_logprobs:
        wanted.context.note_ignored("top_logprobs")
    return Ask([wanted], partial(form, body.model, top), body.stream is not False, kept)


class OllamaFrame(Reply):
    """A frame of /api/generate or /api/chat, and its whole reply without a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = Field(default=None)
    device: str | None = Field(default=None, description="what ran it; at the end of an answer")


OPERATIONS = (
    ApiOperation(
        "post",
        "/api/generate",
        answering(_generate),
        "Ollama: continue a prompt",
        {JSON: OllamaFrame, LINES: None},
        GenerateBody,
        inference=True,
    ),
    ApiOperation(
        "post",
        "/api/chat",
        answering(_chat),
        "Ollama: answer a conversation",
        {JSON: OllamaFrame, LINES: None},
        OllamaChatBody,
        inference=True,
    ),
)
