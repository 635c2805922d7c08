"""The cloud as a backend: one attempt in OpenAI's dialect, within the call's deadline and the spend cap."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from backend_client.calls import BaseClient
from backend_client.cloud import Ledger
from backend_client.cloud.attempt import CloudAttempt, CloudState, check_model, usage_in
from backend_client.errors import ClientClosed, CloudError, CloudRejected, ConfigurationError, StreamInterrupted
from backend_client.fleet.node import Availability
from backend_client.http.answers import choices_in, completion_in, reading, vectors_in
from backend_client.http.messages import ModelReport, NotAnAnswer, Request, Vectors, encode, plain_name, read_json
from backend_client.http.replies import Forwarded, TokenCount, asks_for_stream, tokens_of_prompt
from backend_client.http.routes import hides_usage, only_on_nodes, texts_to_embed
from backend_client.http.stream_forms import (
    CHAT,
    EventParser,
    EventStream,
    Json,
    StreamEvent,
    failure_in,
    read_event,
)
from backend_client.lifetime import STARTED, Clock, Deadline, OpenCalls, owning
from backend_client.options import ClientOptions
from backend_client.results import Attempt, ChatChoice, EmbedBatch, Origin, RawReply, Usage, origin_fields
from backend_client.sdk.client import httpx
from backend_client.sdk.routes import embedding_body
from backend_client.settings import ClientSettings, CloudSettings

_CHAT = "/v1/chat/completions"
# What local servers know beside OpenAI's parameters.
_LOCAL = (
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "chat_template_kwargs",
    "num_ctx", "repeat_penalty", "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens",
    "n_predict", "priority", "keep_alive",
)  # fmt: skip
# A cloud that does not know these answers without the form that they ask for; all know `response_format`.
_FORMS_OF_NODES = ("guided_json", "guided_regex", "guided_choice", "structured_outputs")
# Under a spend cap the cloud gets nothing else: what these cost is bounded by their bytes and the answer's tokens.
_BOUNDED = frozenset({
    "messages", "max_tokens", "max_completion_tokens", "n", "stop", "seed", "temperature", "top_p",
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "tools",
    "tool_choice", "parallel_tool_calls", "functions", "function_call", "prediction", "reasoning_effort", "verbosity",
    "metadata", "store", "user", "safety_identifier", "prompt_cache_key", "stream", "stream_options",
    *_LOCAL,
}) - {"n_predict", "priority"}  # fmt: skip
_BOUNDED_IN_MESSAGES = frozenset({
    "role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "reasoning_content",
})  # fmt: skip
# A chat template and special tokens add a few.
_TEMPLATE_TOKENS = 64
# The most that any of OpenAI's models counts for one image in high detail.
_IMAGE_TOKENS = 50_000
# No tokenizer makes more than one token of a byte; special tokens add a few.
_SPECIAL_TOKENS = 4
_CONCURRENCY = 8


class CloudBackend:
    def __init__(
        self,
        settings: CloudSettings,
        new_availability: Callable[[], Availability],
        ledger: Ledger,
        clock: Clock,
        options: ClientOptions,
    ) -> None:
        self._settings = settings
        self._silence = options.timeouts.silence
        self._spaces = {model: space for space, model in settings.embedding_models.items()}
        self._headers = {name.lower() for name in settings.extra_headers}
        self._dimensions: dict[str, int] = {}
        self._chat_models = {plain_name(name): model for name, model in settings.chat_models.items()}
        # Made here and not by the first call: reading the certificates and importing the SDK's parts block for 100 ms
        # and more, which the deadline of a call and the service's event loop cannot afford.
        self._sdk = _sdk(settings, options.max_reply_bytes)
        self.calls = OpenCalls(self._sdk.close)
        name = settings.base_url or "https://api.openai.com/v1"
        self.state = CloudState(name, new_availability, ledger, clock, self.calls)

    @property
    def spaces(self) -> Collection[str]:
        return self._settings.embedding_models

    def chat_model_for(self, name: str | None) -> str | None:
        """The cloud's model for one of the fleet (None: the fleet's default); None when none is declared for it."""
        return self._settings.chat_model if name is None else self._chat_models.get(plain_name(name))

    def refusal(self, request: Request) -> str | None:
        if reason := only_on_nodes(request):
            return reason
        embeds = texts_to_embed(request) is not None
        return self._embedding_refusal(request) if embeds else self._chat_refusal(request)

    def concurrency(self) -> int:
        return _CONCURRENCY

    async def close(self) -> None:
        await self.calls.close()

    async def embed(self, request: Request) -> EmbedBatch:
        """Embed with the model that is mapped to the request's space. Raises CloudError."""
        self._check(request)
        model, texts = self._embedding_model(request), texts_to_embed(request) or []
        bound = sum(len(text.encode(errors="replace")) + _SPECIAL_TOKENS for text in texts)
        attempt = await CloudAttempt.begin(self.state, request, model, Usage(bound))
        vectors, usage = await attempt.run(lambda: self._embed(request, texts, attempt))
        attempt.succeeded(usage)
        return EmbedBatch(
            vectors=vectors,
            space=request.space.name or self._spaces[model],
            usage=usage or attempt.bound,
            **attempt.origin(),
        )

    async def send(self, request: Request) -> RawReply:
        """The whole reply to a chat, or to a prompt. Raises CloudError."""
        if texts_to_embed(request) is not None:
            batch = await self.embed(request)
            body = embedding_body(batch, request.body.get("encoding_format"))
            origin = origin_fields(batch) | {"headers": {"x-space": batch.space}}
            return RawReply(body=body, usage=batch.usage, **origin)
        self._check(request)
        chat = _as_chat(request)
        attempt, body = await self._chat_attempt(chat)
        found, usage = await attempt.run(lambda: self._whole(chat, attempt, body))
        attempt.succeeded(usage)
        if chat is not request:
            choice = choices_in(found)[0]
            found = {"text": choice.text, "finish_reason": choice.finish_reason}
        return _reply(attempt, usage, found)

    async def open(self, request: Request) -> EventStream:
        """The reply as a stream; returns when the answer has begun. Raises CloudError."""
        return (await self._open(request))[0]

    async def _open(self, request: Request) -> tuple[EventStream, CloudAttempt]:
        self._check(request)
        chat = _as_chat(request)
        attempt, body = await self._chat_attempt(chat)
        events = self._events(chat, attempt, body)
        held = await attempt.run(lambda: _begun(events))
        silence = min(self._silence, request.failover.stall_s or self._silence)
        items = _follow(attempt, held, events, request.end_of_stream(), silence, as_chat=chat is request)
        return items, attempt

    async def forward(self, request: Request) -> Forwarded:
        """The reply to a request that came as bytes, in OpenAI's form. Raises CloudError."""
        request = replace(request, content=None)
        body, count = request.body, TokenCount(tokens_of_prompt(request.body))
        if not asks_for_stream(request):
            return Forwarded.whole(await self.send(request))
        events, attempt = await self._open(request)
        origin, attempts = Origin(**attempt.origin() | {"attempts": ()}), list[Attempt]()
        head = {"content-type": "text/event-stream; charset=utf-8"}
        return Forwarded(
            head,
            origin,
            attempts,
            count,
            _encoded(events, attempts, count, with_usage=not hides_usage(request.path, body)),
        )

    async def models(self) -> list[ModelReport]:
        """None: its models are those of the settings."""
        return []

    async def _embed(self, request: Request, texts: list[str], attempt: CloudAttempt) -> tuple[Vectors, Usage | None]:
        model = attempt.model
        body = {"model": model, "input": texts, "encoding_format": "float"}
        response = await self._client(request).post("/embeddings", cast_to=httpx.Response, body=body)
        found = read_json(response.content)
        with reading("a list of embeddings"):
            # Their order is in `index`, and nowhere else.
            found["data"] = sorted(found["data"], key=lambda row: row["index"])
        vectors = vectors_in(found, len(texts))
        check_model(model, found)
        dimensions, space = vectors.shape[1], request.space.name or self._spaces[model]
        known = request.space.dimensions or self._dimensions.setdefault(space, dimensions)
        if dimensions != known:
            raise NotAnAnswer(f"vectors of {dimensions} dimensions, those of their space have {known}")
        return vectors, usage_in(found, attempt.bound)

    def _client(self, request: Request) -> AsyncOpenAI:
        headers = {name: value for name, value in request.extra_headers.items() if name.lower() in self._headers}
        # The attempt bounds the time.
        return self._sdk.with_options(timeout=None, default_headers=headers or None)

    async def _chat_attempt(self, request: Request) -> tuple[CloudAttempt, Json]:
        """The reservation of the most that the request may cost, and its body."""
        body = self._body(request)
        texts, images = _without_images(body)
        # No tokenizer makes more than one token of a byte.
        prompt = len(encode(texts)) + _TEMPLATE_TOKENS + images * _IMAGE_TOKENS
        # What was predicted in vain is billed as written.
        predicted = len(encode({"": body["prediction"]})) if body.get("prediction") else 0
        bound = Usage(prompt, (self._limit(body) + predicted) * (body.get("n") or 1))
        return await CloudAttempt.begin(self.state, request, body["model"], bound), body

    def _limit(self, body: Mapping[str, Any]) -> int:
        return body.get("max_completion_tokens") or body.get("max_tokens") or self._settings.max_tokens

    def _body(self, request: Request) -> Json:
        given = dict(request.body)
        limit = self._limit(given)
        for name in ("max_tokens", "max_completion_tokens", "stream"):
            given.pop(name, None)
        # OpenAI's newer models refuse max_tokens; servers that speak its API may know nothing else.
        name = "max_tokens" if self._settings.base_url else "max_completion_tokens"
        form = given.get("response_format")
        if isinstance(form, dict) and isinstance(form.get("json_schema"), dict):
            # Nodes enforce a schema always, OpenAI only a strict one.
            given["response_format"] = {**form, "json_schema": {"strict": True, **form["json_schema"]}}
        return {**given, "model": request.model or self._settings.chat_model or "", name: limit}

    async def _whole(self, request: Request, attempt: CloudAttempt, body: Json) -> tuple[Json, Usage | None]:
        response = await self._client(request).post("/chat/completions", cast_to=httpx.Response, body=body)
        found: Json = read_json(response.content)
        choices: tuple[ChatChoice, ...] = completion_in(body, found)
        check_model(attempt.model, found, self._settings.answers_as.get(attempt.model, ()))
        return found, usage_in(found, attempt.bound, "".join(choice.text for choice in choices))

    async def _events(self, request: Request, attempt: CloudAttempt, body: Json) -> AsyncGenerator[StreamEvent, None]:
        """The events up to `[DONE]`, which is there also where the cloud sends none."""
        read, parser = CHAT.reader(body), EventParser()
        create = self._client(request).chat.completions.with_streaming_response.create
        async with create(messages=[], model="", extra_body=CHAT.request(body)) as response:
            parsed = (read_event(event) async for chunk in response.iter_bytes() for event in parser.feed(chunk))
            async for event in parsed:
                if event.data is None:
                    break
                if failure_in(event) is not None or not isinstance(event.data.get("choices"), list):
                    raise NotAnAnswer("an event is not a part of a chat completion")
                check_model(attempt.model, event.data, self._settings.answers_as.get(attempt.model, ()))
                yield read(event)
        yield read(StreamEvent("message", None))

    def _check(self, request: Request) -> None:
        refusal = self.refusal(request)
        if refusal is not None:
            raise CloudRejected(f"the cloud cannot serve this: {refusal}", node=self.state.name)

    def _chat_refusal(self, request: Request) -> str | None:
        body = request.body
        if request.path == "/inference" and body.get("raw"):
            return "it applies its own chat template, and the prompt is raw"
        body = _as_chat(request).body
        if not (request.model or self._settings.chat_model):
            return "cloud.chat_model is not set"
        if asked := [name for name in _FORMS_OF_NODES if body.get(name) is not None]:
            return f"only nodes hold an answer to {', '.join(asked)}"
        local = [name for name in _LOCAL if body.get(name) is not None]
        if local and not self._settings.base_url:
            return f"OpenAI has no {', '.join(local)}"
        unbounded = _unbounded(body) if request.spend_limit is not None or self._settings.spend_cap is not None else []
        return f"the spend cap cannot bound what {', '.join(unbounded)} costs" if unbounded else None

    def _embedding_refusal(self, request: Request) -> str | None:
        body, space = request.body, request.space.name
        if body.get("truncate") and not _fits(request):
            return "it cannot truncate as the nodes do (truncate=True)"
        if body.get("input_type") is not None:
            return "it does not know the prompts of the nodes' model (input_type)"
        if space is None and body.get("dimensions") is not None:
            return "it does not cut vectors as the nodes do (dimensions)"
        if self._embedding_model(request):
            return None
        if space is None:
            return "name one of the models of cloud.embedding_models"
        return f"no cloud model is declared for the vector space {space} (cloud.embedding_models)"

    def _embedding_model(self, request: Request) -> str:
        """The mapped model; for a caller of the cloud itself, who names no space, the one that is named or the only
        one.
        """
        if request.space.name is not None:
            return self._settings.embedding_models.get(request.space.name, "")
        if request.model in self._spaces:
            return request.model or ""
        return next(iter(self._spaces)) if request.model is None and len(self._spaces) == 1 else ""


async def _begun(events: AsyncGenerator[StreamEvent, None]) -> list[StreamEvent]:
    """The events up to the first one with a part of the answer."""
    held = [await anext(events)]
    while not CHAT.begins(held[-1]):
        held.append(await anext(events))
    return held


@owning
async def _follow(
    attempt: CloudAttempt,
    held: list[StreamEvent],
    events: AsyncGenerator[StreamEvent, None],
    ends: Deadline,
    silence: float,
    *,
    as_chat: bool,
) -> EventStream:
    """Yield the events, those that are `held` first, the last one when the attempt has succeeded, and the reply; those
    of /inference if not `as_chat`.

    Raises StreamInterrupted, with the text so far, when the stream fails, sends nothing for `silence` seconds, or has
    not ended when it must.
    """
    parts: list[str] = []
    reason = ""
    said: Json = {}
    usage: Usage | None = None
    failed: CloudError | ClientClosed | None = None
    try:
        yield STARTED
        while True:
            if held:
                event = held.pop(0)
            else:
                event = await attempt.run(lambda: anext(events), min(silence, ends.remaining()))
            if event.data is None:
                break
            parts.append(event.text)
            said = event.data if event.data.get("usage") else said
            reason = event.finish_reason or reason
            if as_chat:
                yield event
            elif event.text:
                yield StreamEvent("token", {"text": event.text})
        usage = usage_in(said, attempt.bound, "".join(parts))
        attempt.succeeded(usage)
    except (CloudError, ClientClosed) as error:
        failed = error
    finally:
        attempt.abandoned()
        await events.aclose()
    if failed is not None:
        raise StreamInterrupted.after(parts, failed, attempts=failed.attempts, request_id=attempt.request.request_id)
    yield event if as_chat else StreamEvent("done", {"finish_reason": reason})
    yield _reply(attempt, usage, None)


def _unbounded(body: Mapping[str, Any]) -> list[str]:
    """The parts of a body that may cost more than its bound, by name."""
    given = {name: value for name, value in body.items() if value is not None}
    found = [name for name in given if name not in _BOUNDED]
    if not _of_kinds(given.get("tools") or [], ("function",)):
        found.append("tools of another type than function")
    messages = given.get("messages")
    for message in messages if isinstance(messages, list) else [None]:
        if not isinstance(message, Mapping):
            return [*found, "messages that are not a list of objects"]
        found += [
            f"{name} of a message" for name, value in message.items() if value and name not in _BOUNDED_IN_MESSAGES
        ]
        content = message.get("content")
        if not isinstance(content, str | None) and not _of_kinds(content, ("text", "image_url", "refusal")):
            found.append("content other than text and image_url")
    return found


def _of_kinds(parts: Any, kinds: Sequence[str]) -> bool:
    """Whether it is a list of `{"type": KIND, KIND: …}` and nothing else."""
    return isinstance(parts, list) and all(
        isinstance(part, Mapping) and (kind := part.get("type")) in kinds and part.keys() <= {"type", kind}
        for part in parts
    )


def _without_images(body: Json) -> tuple[Json, int]:
    """The body without the images in its messages, and how many there are."""
    count = 0
    messages = []
    for message in body.get("messages") or ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            images = [isinstance(part, Mapping) and part.get("type") == "image_url" for part in content]
            count += sum(images)
            parts = [
                {**part, "image_url": None} if image else part for part, image in zip(content, images, strict=True)
            ]
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    return {**body, "messages": messages}, count


def _reply(attempt: CloudAttempt, usage: Usage | None, body: Json | None) -> RawReply:
    return RawReply(body=body, usage=usage or attempt.bound, **attempt.origin())


def _as_chat(request: Request) -> Request:
    """A prompt for /inference as a chat of one message; a chat as it is."""
    if request.path != "/inference":
        return request
    given = {{"max_new_tokens": "max_tokens"}.get(name, name): value for name, value in request.body.items()}
    body = {"messages": [{"role": "user", "content": given.pop("prompt")}], **given}
    return replace(request, path=_CHAT, body=body)


class _BoundedStream(httpx.AsyncByteStream):
    """The bytes of a reply. Raises NotAnAnswer after `most` of them."""

    def __init__(self, stream: httpx.AsyncByteStream, most: int) -> None:
        self._stream, self._most = stream, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._most
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise NotAnAnswer(f"it has more than {self._most} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _sdk(settings: CloudSettings, max_reply_bytes: int) -> AsyncOpenAI:
    async def bound(response: httpx.Response) -> None:
        # A compressed reply, which was not asked for, could become a thousand times as large.
        if response.headers.get("content-encoding", "identity") != "identity":
            raise NotAnAnswer("it is compressed")
        if isinstance(response.stream, httpx.AsyncByteStream):
            response.stream = _BoundedStream(response.stream, max_reply_bytes)

    sdk = AsyncOpenAI(
        api_key=settings.api_key.get_secret_value(),
        base_url=settings.base_url,
        # One loop retries, ours.
        max_retries=0,
        # What is sent there is not to go anywhere else.
        http_client=DefaultAsyncHttpxClient(
            follow_redirects=False, headers={"Accept-Encoding": "identity"}, event_hooks={"response": [bound]}
        ),
    )
    # The SDK imports these when they are first asked for.
    _ = sdk.embeddings, sdk.chat.completions
    return sdk


def _fits(request: Request) -> bool:
    """Whether no text can be too long for the model, so that there is nothing to truncate."""
    limit = request.space.context_limit
    texts = texts_to_embed(request) or ()
    return limit is not None and all(len(text.encode()) + _SPECIAL_TOKENS <= limit for text in texts)


@owning
async def _encoded(
    events: EventStream, attempts: list[Attempt], count: TokenCount, *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The events as bytes; notes the attempt and the tokens."""
    try:
        yield STARTED
        async for item in events:
            if isinstance(item, RawReply):
                attempts += item.attempts
                count.read({"usage": asdict(item.usage)})
                count.complete = True
                continue
            if item.text:
                count.write(item.text)
            if with_usage or not item.only_usage:
                yield item.encode()
    finally:
        await events.aclose()


class CloudClient(BaseClient):
    """Calls an OpenAI-compatible API, with the same methods as NPUClient. `ledger` counts tokens and cost.

    Embeddings are served by the models of `settings.embedding_models` only; their results are in the mapped space.
    """

    def __init__(
        self,
        settings: CloudSettings,
        *,
        options: ClientOptions | None = None,
        ledger: Ledger | None = None,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        if not isinstance(settings, CloudSettings):
            raise ConfigurationError("CloudClient takes CloudSettings")
        options = options or ClientOptions()
        self.ledger = ledger or Ledger(settings.prices, settings.spend_cap)
        new_availability = partial(Availability, options.breaker, clock, rng or random.Random())
        self.service = CloudBackend(settings, new_availability, self.ledger, clock, options)
        super().__init__(self.service, self.service, options, clock)

    @classmethod
    def from_settings(cls, settings: ClientSettings | None = None, **options: Any) -> Self:
        """The client for the settings' `cloud`. Raises ConfigurationError when there is none."""
        settings = ClientSettings.with_values(settings, options)
        if settings.cloud is None:
            raise ConfigurationError("no cloud is configured: set NPU_CLIENT_CLOUD__API_KEY")
        return cls(settings.cloud, options=settings.options())
