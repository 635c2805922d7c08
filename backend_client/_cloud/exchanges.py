"""Chats that go to the cloud in OpenAI's dialect: one attempt, within the deadline and the spend cap."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from backend_client._cloud.attempt import CloudAttempt
from backend_client._cloud.reply import check_model, usage_in
from backend_client._protocol import wire
from backend_client._protocol.answers import NotAnAnswer, read_answer, read_json
from backend_client._protocol.dialect import FORMS, Json, StreamEvent, failure_in, read_event
from backend_client._protocol.jobs import EventStream, Exchange
from backend_client._protocol.sdk_http import httpx
from backend_client._protocol.sse import EventParser
from backend_client._resilience.deadline import Deadline
from backend_client.errors import ClientClosed, CloudError, StreamInterrupted
from backend_client.results import ChatChoice, RawReply, Usage
from backend_client.settings import CloudSettings

_CHAT = "/v1/chat/completions"
_FORM = FORMS[_CHAT]
# What local servers know beside OpenAI's parameters.
_LOCAL = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "chat_template_kwargs",
    "num_ctx",
    "repeat_penalty",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "n_predict",
    "priority",
    "keep_alive",
)
# Under a spend cap the cloud gets nothing else: what these cost is bounded by their bytes and the answer's tokens.
_BOUNDED = frozenset({
    "messages", "max_tokens", "max_completion_tokens", "n", "stop", "seed", "temperature", "top_p",
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "tools",
    "tool_choice", "parallel_tool_calls", "functions", "function_call", "prediction", "reasoning_effort", "verbosity",
    "metadata", "store", "user", "safety_identifier", "prompt_cache_key", "stream_options",
    *_LOCAL,
}) - {"n_predict", "priority"}  # fmt: skip
_BOUNDED_IN_MESSAGES = frozenset({
    "role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "reasoning_content",
})  # fmt: skip
# A chat template and special tokens add a few.
_TEMPLATE_TOKENS = 64
# The most that any of OpenAI's models counts for one image in high detail.
_IMAGE_TOKENS = 50_000


class CloudExchanges:
    """`start` reserves the cost of a request and returns its attempt; it raises what forbids the request."""

    def __init__(
        self,
        settings: CloudSettings,
        client: Callable[[Exchange], AsyncOpenAI],
        start: Callable[[Exchange, str, Usage], CloudAttempt],
    ) -> None:
        self._settings = settings
        self._client = client
        self._start = start

    def refusal(self, job: Exchange) -> str | None:
        """Why the cloud cannot serve it, or None."""
        body = job.body or {}
        if job.only_on_nodes:
            return job.only_on_nodes
        if not (job.model or self._settings.chat_model):
            return "cloud.chat_model is not set"
        local = [name for name in _LOCAL if body.get(name) is not None]
        if local and not self._settings.base_url:
            return f"OpenAI has no {', '.join(local)}"
        unbounded = _unbounded(body) if self._settings.spend_cap is not None else []
        return f"the spend cap cannot bound what {', '.join(unbounded)} costs" if unbounded else None

    async def exchange(self, job: Exchange) -> RawReply:
        """The whole reply. Raises CloudError."""
        attempt, body = self._attempt(job)
        found, usage = await attempt.run(self._whole(job, attempt, body))
        attempt.succeeded(usage)
        return _reply(attempt, usage, found)

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """The reply as a stream; returns when the answer has begun. Raises CloudError."""
        attempt, body = self._attempt(job)
        events = self._events(job, attempt, body)
        held = await attempt.run(_begun(events), opened_by)
        return _follow(attempt, _all(held, events))

    def _attempt(self, job: Exchange) -> tuple[CloudAttempt, Json]:
        """The reservation of the most that the request may cost, and its body."""
        body = self._body(job)
        texts, images = _without_images(body)
        # No tokenizer makes more than one token of a byte.
        prompt = len(wire.encode(texts)) + _TEMPLATE_TOKENS + images * _IMAGE_TOKENS
        # What was predicted in vain is billed as written.
        predicted = len(wire.encode({"": body["prediction"]})) if body.get("prediction") else 0
        bound = Usage(prompt, (self._limit(body) + predicted) * (body.get("n") or 1))
        return self._start(job, body["model"], bound), body

    def _limit(self, body: Mapping[str, Any]) -> int:
        return body.get("max_completion_tokens") or body.get("max_tokens") or self._settings.max_tokens

    def _body(self, job: Exchange) -> Json:
        given = dict(job.body or {})
        limit = self._limit(given)
        for name in ("max_tokens", "max_completion_tokens", "stream"):
            given.pop(name, None)
        # OpenAI's newer models refuse max_tokens; servers that speak its API may know nothing else.
        name = "max_tokens" if self._settings.base_url else "max_completion_tokens"
        form = given.get("response_format")
        if isinstance(form, dict) and isinstance(form.get("json_schema"), dict):
            # Nodes enforce a schema always, OpenAI only a strict one.
            given["response_format"] = {**form, "json_schema": {"strict": True, **form["json_schema"]}}
        return {**given, "model": job.model or self._settings.chat_model or "", name: limit}

    async def _whole(self, job: Exchange, attempt: CloudAttempt, body: Json) -> tuple[Json, Usage | None]:
        response = await self._client(job).post("/chat/completions", cast_to=httpx.Response, body=body)
        found: Json = read_json(response.content)
        choices: tuple[ChatChoice, ...] = read_answer(_CHAT, body, found)
        check_model(attempt.model, found)
        return found, usage_in(found, attempt.bound, "".join(choice.text for choice in choices))

    async def _events(self, job: Exchange, attempt: CloudAttempt, body: Json) -> AsyncGenerator[StreamEvent, None]:
        """The events up to `[DONE]`, which is there also where the cloud sends none."""
        read = _FORM.reader(body)
        create = self._client(job).chat.completions.with_streaming_response.create
        async with create(messages=[], model="", extra_body=_FORM.request(body)) as response:
            async for event in _parsed(response.iter_bytes()):
                if event.data is None:
                    break
                if failure_in(event) is not None or not isinstance(event.data.get("choices"), list):
                    raise NotAnAnswer("no part of a chat completion")
                check_model(attempt.model, event.data)
                yield read(event)
        yield read(StreamEvent("message", None))


async def _parsed(chunks: AsyncIterator[bytes]) -> AsyncGenerator[StreamEvent, None]:
    parser = EventParser()
    async for chunk in chunks:
        for event in parser.feed(chunk):
            yield read_event(event)


async def _begun(events: AsyncGenerator[StreamEvent, None]) -> list[StreamEvent]:
    """The events up to the first one with a part of the answer."""
    held = [await anext(events)]
    while not _FORM.begins(held[-1]):
        held.append(await anext(events))
    return held


async def _all(held: list[StreamEvent], events: AsyncGenerator[StreamEvent, None]) -> AsyncGenerator[StreamEvent, None]:
    try:
        for event in held:
            yield event
        async for event in events:
            yield event
    finally:
        await events.aclose()


async def _follow(attempt: CloudAttempt, events: AsyncGenerator[StreamEvent, None]) -> EventStream:
    """Yield the events, the last one when the attempt has succeeded, and the reply.

    Raises StreamInterrupted, with the text so far, when the stream fails.
    """
    parts: list[str] = []
    said: Json = {}
    usage: Usage | None = None
    failed: CloudError | ClientClosed | None = None
    try:
        while (event := await attempt.run(anext(events))).data is not None:
            parts.append(event.text)
            said = event.data if event.data.get("usage") else said
            yield event
        usage = usage_in(said, attempt.bound, "".join(parts))
        attempt.succeeded(usage)
    except (CloudError, ClientClosed) as error:
        failed = error
    finally:
        attempt.abandoned()
        await events.aclose()
    if failed is not None:
        raise StreamInterrupted.after(parts, failed, attempts=failed.attempts, request_id=attempt.job.request_id)
    yield event
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
    return RawReply(
        source="cloud",
        node=attempt.state_name,
        model=attempt.model,
        device=None,
        request_id=attempt.job.request_id,
        attempts=(attempt.record("ok", 200),),
        body=body,
        usage=usage or attempt.bound,
    )
