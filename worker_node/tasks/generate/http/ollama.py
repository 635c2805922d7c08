"""Ollama's routes: its models, and POST /api/generate and /api/chat."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from aiohttp import web
from pydantic import Field

from worker_node.core.errors import BadRequest, ModelNotFound, NodeError, NotOffered
from worker_node.core.types import Device, RequestContext
from worker_node.http.body import DialectBody, Table, Unsupported, note_effects, read_body
from worker_node.http.context import NODE, busy_fields, deadline_of
from worker_node.http.middleware import note_failure
from worker_node.http.models import capabilities, chat_first, start_pull
from worker_node.http.replies import Reply, json_response, ollama_error, utc
from worker_node.http.routes import JSON, LINES, ApiOperation
from worker_node.http.sse import LineStream, line
from worker_node.manager.served import ServedModel
from worker_node.models.directory import InstalledModel
from worker_node.structured_output.form import FormPart
from worker_node.tasks.generate.blocks import (
    Block,
    BlockKind,
    Closed,
    Event,
    Finished,
    FinishReason,
    Grown,
    TokenLogprob,
)
from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.conversation import FunctionFields, past_arguments, tool_of
from worker_node.tasks.generate.http.parameters import ContextLength, KeepAlive, RepetitionPenalty, SamplingBody
from worker_node.tasks.generate.http.replies import (
    ParsedRequest,
    Renderer,
    chat_logprobs,
    generation_route,
    known_alternatives,
)
from worker_node.tasks.generate.images import image_of_base64
from worker_node.tasks.generate.request import GenerationRequest, Image, Message, Rendering, ToolCall, ToolUse
from worker_node.tasks.generate.service import Choices

# The version of Ollama's API that this dialect follows. Tools compare it to know what they may ask for.
OLLAMA_API_VERSION = "0.12.6"
_NS_PER_MS = 1e6
_NEVER = "2318-01-01T00:00:00Z"


async def served(request: web.Request, name: str) -> ServedModel:
    """The model of that name. Raises as `ModelManager.resolve`, ModelNotFound in Ollama's words."""
    try:
        return await request.app[NODE].manager.resolve(name, deadline_of(request))
    except ModelNotFound:
        raise _not_found(name) from None


def _not_found(name: str) -> ModelNotFound:
    """In the words that clients look for before they pull."""
    return ModelNotFound(f"model {name[:200]!r} not found", param="model")


_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 10 * 365 * 86400.0


def seconds_of(keep_alive: KeepAlive) -> float | None:
    """How long a model stays in memory; None for good. Raises BadRequest if it is not a duration."""
    if isinstance(keep_alive, int | float):
        seconds = float(keep_alive)
    else:
        sign, text = (-1.0, keep_alive[1:]) if keep_alive.startswith("-") else (1.0, keep_alive)
        if text.isdecimal() and len(text) < 12:
            seconds = sign * float(text)
        elif len(text) < 64 and _DURATION.sub("", text) == "" and text:
            seconds = sign * sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
        else:
            raise BadRequest("keep_alive is a number of seconds or a duration as 5m or 1h30m", param="keep_alive")
    return None if seconds < 0 or math.isinf(seconds) or seconds > _LONGEST_S else seconds


@asynccontextmanager
async def keeping(request: web.Request, model: ServedModel | str, keep_alive: KeepAlive | None) -> AsyncIterator[None]:
    """Keep the model in memory for that long after the block. Before it, raises BadRequest and as `resolve`."""
    if keep_alive is None:
        yield
        return
    seconds = seconds_of(keep_alive)
    if isinstance(model, str):
        model = await request.app[NODE].manager.resolve(model, deadline_of(request))
    try:
        yield
    finally:
        request.app[NODE].manager.keep(model, seconds)


# Models.


class NamedBody(DialectBody):
    """A body that names a model; `name` is the older word for it.

    `insecure` changes nothing: every download is verified.
    """

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None

    def wanted(self) -> str:
        name = self.model or self.name
        if not name:
            raise BadRequest.at("model", "its name is missing")
        return name


async def _version(_request: web.Request) -> web.Response:
    return json_response({"version": OLLAMA_API_VERSION})


async def _tags(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    served_here = {model.id: model for model in manager.models}
    models = []
    for model in chat_first(await manager.installed(deadline_of(request))):
        more = {
            "modified_at": utc(model.installed_at),
            "capabilities": capabilities(model, served_here.get(model.id)),
        }
        models.append(_entry(model) | more)
    return json_response({"models": models})


async def _ps(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    loaded: list[dict[str, Any]] = []
    for model in manager.models:
        placement = model.serving()
        if placement is None:
            continue
        left = manager.expires_in(model)
        until = _NEVER if left is None else utc(time.time() + left)
        loaded.append(
            _entry(model.installed)
            | {
                "expires_at": until,
                # What of it is on an accelerator: all or nothing.
                "size_vram": 0 if placement.device is Device.CPU else model.installed.size,
                "context_length": placement.total_limit,
                "device": placement.device,
            }
        )
    return json_response({"models": loaded})


async def _show(request: web.Request) -> web.Response:
    body = await read_body(request, NamedBody)
    model = await served(request, body.wanted())
    installed = model.installed
    info = {
        "general.architecture": installed.family,
        "general.name": installed.id,
        f"{installed.family}.context_length": installed.context_limit,
    }
    if installed.dimensions is not None:
        info[f"{installed.family}.embedding_length"] = installed.dimensions
    return json_response(
        {
            "license": installed.licence,
            "modelfile": f"# {installed.source}\nFROM {installed.id}\n",
            "parameters": "",
            "template": model.template(),
            "details": _entry(installed)["details"],
            "model_info": info,
            "capabilities": capabilities(installed, model),
            "modified_at": utc(installed.installed_at),
        }
    )


async def _pull(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, NamedBody)
    job = await start_pull(request, body.wanted())
    if body.stream is False:
        await asyncio.wait([job.task])
        if job.error is not None:
            raise job.error
        return json_response({"status": "success"})
    async with LineStream(request, {}) as stream:
        await stream.send({"status": "pulling manifest"})
        async for state in job.changes():
            if state["state"] == "running" and state["stage"] is not None:
                sizes = {} if state["total"] is None else {name: state[name] for name in ("total", "completed")}
                await stream.send({"status": state["stage"], **sizes})
        if job.error is None:
            await stream.send({"status": "success"})
        else:
            note_failure(request, job.error)
            await stream.send(ollama_error(job.error))
    return stream.response


async def _delete(request: web.Request) -> web.Response:
    body = await read_body(request, NamedBody)
    name = body.wanted()
    try:
        await request.app[NODE].manager.delete(name, deadline=deadline_of(request))
    except ModelNotFound:
        raise _not_found(name) from None
    return web.Response()


async def _not_offered(request: web.Request) -> web.Response:
    raise NotOffered(f"{request.path} is not offered: models come from the node's catalog (npu-node pull)")


def _entry(model: InstalledModel) -> dict[str, Any]:
    return {
        "name": f"{model.id}:latest",
        "model": f"{model.id}:latest",
        "size": model.size,
        "digest": model.digest,
        "details": {
            "parent_model": "",
            "format": "openvino",
            "family": model.family,
            "families": [model.family],
            # Not told by the files: empty rather than guessed.
            "parameter_size": "",
            "quantization_level": model.quantization,
        },
    }


# Answers.


def frame(model: str, **fields: Any) -> dict[str, Any]:
    """A frame; `model` is the name that the client used."""
    return {"model": model, "created_at": utc(time.time()), **fields}


class _Frames(Renderer):
    """One answer. `model` is the name that the client used, `top_logprobs` None without log probabilities."""

    frames = LineStream

    def __init__(self, model: str, top_logprobs: int | None, choices: Choices, *, chat: bool) -> None:
        self._model = model
        self._top = top_logprobs
        self._run = choices.runs[0]
        self._chat = chat

    def _fields(self, text: str, thinking: str = "", calls: Sequence[Block] = ()) -> dict[str, Any]:
        """The fields that hold a part of the answer."""
        thought = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {"response": text, **thought}
        turn: dict[str, Any] = {"role": "assistant", "content": text, **thought}
        if calls:
            turn["tool_calls"] = [
                {"function": {"name": call.name, "arguments": past_arguments(call.text)}} for call in calls
            ]
        return {"message": turn}

    def event(self, event: Event, *_: int) -> bytes:
        """A call makes a frame when it is complete."""
        match event:
            case Grown(block, text, logprobs) if block.kind is not BlockKind.CALL:
                said = self._fields(text) if block.kind is BlockKind.TEXT else self._fields("", text)
                return line(frame(self._model, **said, done=False, **self._logprobs(logprobs)))
            case Closed(block) if block.kind is BlockKind.CALL and not block.cut:
                return line(frame(self._model, **self._fields("", calls=[block]), done=False))
            case Finished() as finished:
                return line(self._last(finished, self._fields("")))
        return b""

    def failure(self, error: NodeError) -> bytes:
        return line(ollama_error(error))

    def whole(self, ends: Sequence[Finished]) -> dict[str, Any]:
        [finished] = ends
        said = self._fields(finished.text(), finished.text(BlockKind.REASONING), finished.calls)
        return self._last(finished, said) | self._logprobs(finished.logprobs)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(tokens, self._top)["content"]} if tokens and self._top is not None else {}

    def _last(self, finished: Finished, said: dict[str, Any]) -> dict[str, Any]:
        """The last frame. Reading the prompt takes from the engine's start to the first token."""
        timing = finished.timing
        started = timing.total - timing.inference
        reading = timing.inference if timing.first_token is None else max(0.0, timing.first_token - started)
        return frame(
            self._model,
            **said,
            done=True,
            done_reason="length" if finished.finish_reason is FinishReason.LENGTH else "stop",
            total_duration=round(timing.total * _NS_PER_MS),
            load_duration=round(self._run.execution.selection.loading_s * 1e9),
            prompt_eval_count=finished.usage.prompt_tokens,
            prompt_eval_duration=round(reading * _NS_PER_MS),
            eval_count=finished.usage.completion_tokens,
            eval_duration=round(max(0.0, timing.inference - reading) * _NS_PER_MS),
            **busy_fields(finished.busy),
            device=str(self._run.execution.route.device),
        )


# Bodies.


class OllamaOptions(SamplingBody):
    """Sampling options. Those on memory and threads change no answer and are ignored."""

    # Ollama's documents had them once. What they have now and this engine lacks (`typical_p`, `repeat_last_n`) is
    # ignored: clients send Ollama's own example.
    rules: ClassVar[Table] = {
        "mirostat": Unsupported("this engine has no Mirostat sampling"),
        "tfs_z": Unsupported("this engine has no tail-free sampling", (1,)),
    }

    num_predict: Annotated[int, Field(ge=-2, le=1_000_000)] | None = None
    num_ctx: ContextLength | None = None
    repeat_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None


class _Common(DialectBody):
    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def request(self, context: RequestContext, model: str, **more: Any) -> GenerationRequest:
        options = self.options or OllamaOptions()
        form = None
        if self.format:
            # Ollama passes over what it cannot enforce, and has no word for strict.
            schema = {"type": "object"} if isinstance(self.format, str) else self.format
            form = FormPart(schema, "format", strict=False)
        return GenerationRequest(
            context,
            sampling=parameters.sampling(
                vars(options), dialect_defaults=parameters.OLLAMA_DEFAULTS, logprobs=bool(self.logprobs)
            ),
            model=model,
            grammar=form,
            # Some templates know levels of thinking; others think or do not.
            rendering=Rendering({"reasoning_effort": self.think}, think=True)
            if isinstance(self.think, str)
            else Rendering(think=self.think),
            context_limit=options.num_ctx,
            # False is what always happens here: an answer ends where the context does.
            ignored=["shift"] if self.shift else [],
            **more,
        )


class GenerateBody(_Common):
    rules: ClassVar[Table] = {
        "context": Unsupported("earlier tokens cannot be handed back; use /api/chat with the earlier messages"),
        "suffix": Unsupported("text cannot be filled in before a suffix: the models here only continue a prompt"),
        "template": Unsupported("the model's own template cannot be replaced; send raw: true and a finished prompt"),
    }
    takes_images: ClassVar[bool] = True

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaCall(DialectBody):
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
    class OllamaOfferedFunction(FunctionFields):
        name: Annotated[str, Field(min_length=1, max_length=128)]

    type: Literal["function"] | None = None
    function: OllamaOfferedFunction


class OllamaChatBody(_Common):
    takes_images: ClassVar[bool] = True

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None
    truncate: bool | None = None


def _images(images: Sequence[str] | None, where: str) -> tuple[Image, ...]:
    """Images come before the text, as in Ollama. Raises BadRequest, PayloadTooLarge."""
    return tuple(image_of_base64(image, 0, f"{where}[{number}]") for number, image in enumerate(images or ()))


async def _generate(
    request: web.Request, context: RequestContext, body: GenerateBody
) -> ParsedRequest | web.StreamResponse:
    if not body.prompt and not body.images:
        return await _load_or_unload(request, context, body, {"response": ""})
    model = await served(request, body.model)
    prompt: str | tuple[Message, ...] = body.prompt or ""
    if not body.raw:
        system = (Message("system", body.system),) if body.system else ()
        prompt = (*system, Message("user", body.prompt or "", images=_images(body.images, "images")))
    elif body.images:
        raise BadRequest.at("images", "a raw prompt has no place for them")
    elif body.system:
        raise BadRequest.at("system", "a raw prompt has no place for it")
    wanted = body.request(context, model.id, prompt=prompt, split_reasoning=not body.raw)
    return _ask(request, body, model, wanted)


async def _chat(
    request: web.Request, context: RequestContext, body: OllamaChatBody
) -> ParsedRequest | web.StreamResponse:
    if not body.messages:
        empty = {"message": {"role": "assistant", "content": ""}}
        return await _load_or_unload(request, context, body, empty)
    model = await served(request, body.model)
    tools = [tool_of(tool.function, f"tools[{index}].function") for index, tool in enumerate(body.tools or [])]
    turns = []
    for number, turn in enumerate(body.messages):
        calls = [ToolCall(call.function.name, call.function.arguments) for call in turn.tool_calls or []]
        images = _images(turn.images, f"messages[{number}].images")
        turns.append(Message(turn.role, turn.content or "", tuple(calls), turn.tool_name, images))
    wanted = body.request(
        context,
        model.id,
        prompt=tuple(turns),
        tool_use=ToolUse(tuple(tools)) if tools else None,
        split_reasoning=True,
        # Ollama's own default.
        drop_oldest=body.truncate is not False,
    )
    return _ask(request, body, model, wanted)


async def _load_or_unload(
    request: web.Request, context: RequestContext, body: _Common, empty: dict[str, Any]
) -> web.StreamResponse:
    """A request that asks for no text loads its model, or unloads it with `keep_alive` 0."""
    manager = request.app[NODE].manager
    model = await served(request, body.model)
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    if seconds == 0:
        manager.unload(model)
    else:
        await manager.load(model, context.deadline)
        if body.keep_alive is not None:
            manager.keep(model, seconds)
    done = frame(body.model, **empty, done=True, done_reason="unload" if seconds == 0 else "load")
    if body.stream is False:
        return json_response(done)
    async with LineStream(request, {}) as stream:
        await stream.send(done)
    return stream.response


def _ask(request: web.Request, body: _Common, model: ServedModel, wanted: GenerationRequest) -> ParsedRequest:
    kept = keeping(request, model, body.keep_alive)
    top = None
    if body.logprobs:
        sampling = wanted.sampling
        given = "temperature" not in sampling.open_fields
        temperature = sampling.temperature if given else parameters.OLLAMA_DEFAULTS["temperature"]
        top = known_alternatives(request, "top_logprobs", body.top_logprobs or 0, temperature)
    elif body.top_logprobs:
        note_effects(request, ["top_logprobs"])
    renderer = partial(_Frames, body.model, top, chat=isinstance(body, OllamaChatBody))
    return ParsedRequest([wanted], renderer, body.stream is not False, kept)


class OllamaFrame(Reply):
    """A frame, and the whole reply without a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = Field(default=None)
    device: str | None = Field(default=None, description="what ran it; at the end of an answer")


class OllamaVersion(Reply):
    version: str


class OllamaModels(Reply):
    models: list[dict[str, Any]]


class OllamaShow(Reply):
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaStatus(Reply):
    status: str


OPERATIONS = (
    generation_route("/api/generate", _generate, "Ollama: continue a prompt", OllamaFrame, GenerateBody, LINES),
    generation_route("/api/chat", _chat, "Ollama: answer a conversation", OllamaFrame, OllamaChatBody, LINES),
    ApiOperation("get", "/api/version", _version, "Ollama: version of the API", {JSON: OllamaVersion}),
    ApiOperation("get", "/api/tags", _tags, "Ollama: list models", {JSON: OllamaModels}),
    ApiOperation("get", "/api/ps", _ps, "Ollama: models in memory", {JSON: OllamaModels}),
    ApiOperation("post", "/api/show", _show, "Ollama: one model", {JSON: OllamaShow}, NamedBody),
    ApiOperation("post", "/api/pull", _pull, "Ollama: install a model", {JSON: OllamaStatus, LINES: None}, NamedBody),
    ApiOperation("delete", "/api/delete", _delete, "Ollama: remove a model", {}, NamedBody),
    *(
        ApiOperation("post", f"/api/{name}", _not_offered, "Ollama: not offered", {})
        for name in ("create", "copy", "push")
    ),
)
