"""Chats in OpenAI's dialect that go to the cloud as they are: one attempt, within the deadline and the spend cap."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI, AsyncStream

from backend_client._cloud.attempt import CloudAttempt
from backend_client._cloud.reply import NotAnAnswer, usage_in
from backend_client._cloud.streams import CloudReading, follow
from backend_client._protocol.dialect import FORMS, Json, StreamEvent
from backend_client._protocol.jobs import EventStream, Exchange
from backend_client._resilience.deadline import Deadline
from backend_client.errors import CloudRejected
from backend_client.results import RawReply, Usage
from backend_client.settings import CloudSettings

_CHAT = "/v1/chat/completions"
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
        if job.path != _CHAT or job.method != "POST":
            return f"it serves chats and embeddings only, and this is {job.path}"
        if not (job.model or self._settings.chat_model):
            return "cloud.chat_model is not set"
        local = [name for name in _LOCAL if body.get(name) is not None]
        if local and not self._settings.base_url:
            return f"OpenAI has no {', '.join(local)}"
        return None

    async def exchange(self, job: Exchange) -> RawReply:
        """The whole reply. Raises CloudError."""
        attempt = self._attempt(job)
        body = await attempt.run(self._whole(job, attempt))
        usage = _usage(body)
        attempt.succeeded(usage)
        return _reply(attempt, usage, body)

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """The reply as a stream. Raises CloudError."""
        attempt = self._attempt(job)
        events = self._events(job, attempt)
        first = await attempt.run(anext(events), opened_by)
        return self._follow(attempt, events, first)

    async def _follow(
        self, attempt: CloudAttempt, events: AsyncGenerator[StreamEvent, None], event: StreamEvent
    ) -> EventStream:
        usage: Usage | None = None
        items = follow(attempt, events, event, _READING)
        try:
            async for found in items:
                usage = _READING.usage(found) or usage
                yield found
        finally:
            await items.aclose()
        yield _reply(attempt, usage, None)

    def _attempt(self, job: Exchange) -> CloudAttempt:
        refusal = self.refusal(job)
        if refusal is not None:
            raise CloudRejected(f"the cloud cannot serve this: {refusal}")
        body = job.body or {}
        texts, images = _without_images(body.get("messages"))
        shape = [texts, body.get("tools"), body.get("response_format")]
        prompt = len(json.dumps(shape, ensure_ascii=False).encode(errors="replace")) + _TEMPLATE_TOKENS
        answers = body.get("n") if isinstance(body.get("n"), int) else 1
        bound = Usage(prompt + images * _IMAGE_TOKENS, self._limit(body) * max(1, answers or 1))
        return self._start(job, job.model or self._settings.chat_model or "", bound)

    def _limit(self, body: Mapping[str, Any]) -> int:
        given = body.get("max_completion_tokens") or body.get("max_tokens")
        return given if isinstance(given, int) else self._settings.max_tokens

    def _body(self, job: Exchange, attempt: CloudAttempt) -> Json:
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
        return {**given, "model": attempt.model, name: limit}

    async def _whole(self, job: Exchange, attempt: CloudAttempt) -> Json:
        found = await self._client(job).post("/chat/completions", cast_to=object, body=self._body(job, attempt))
        if not isinstance(found, dict) or not isinstance(found.get("choices"), list) or not found["choices"]:
            raise NotAnAnswer("no chat completion")
        if job.check is not None and not job.check(found):
            raise NotAnAnswer("no chat completion")
        return found

    async def _events(self, job: Exchange, attempt: CloudAttempt) -> AsyncGenerator[StreamEvent, None]:
        body = self._body(job, attempt)
        body |= {"stream": True, "stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
        finished = False
        async with await self._client(job).post(
            "/chat/completions", cast_to=object, body=body, stream=True, stream_cls=AsyncStream[object]
        ) as stream:
            async for chunk in stream:
                if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list) or not _valid(chunk):
                    raise NotAnAnswer("no part of a chat completion")
                finished = finished or any(
                    isinstance(choice, dict) and choice.get("finish_reason") for choice in chunk["choices"]
                )
                yield StreamEvent("message", chunk)
        if not finished:
            raise NotAnAnswer("a stream that ended before the answer did")
        yield StreamEvent("message", None)


def _valid(chunk: Json) -> bool:
    return FORMS[_CHAT].valid(StreamEvent("message", chunk))


def _without_images(messages: Any) -> tuple[Any, int]:
    """The messages without their images, and how many there are."""
    count = 0

    def strip(value: Any) -> Any:
        nonlocal count
        if isinstance(value, Mapping):
            if value.get("type") in {"image_url", "input_image"}:
                count += 1
                return {}
            return {name: strip(part) for name, part in value.items()}
        return [strip(part) for part in value] if isinstance(value, list | tuple) else value

    return strip(messages), count


def _usage(body: Json) -> Usage | None:
    usage = body.get("usage")
    return usage_in(SimpleNamespace(**usage)) if isinstance(usage, dict) and all(map(str.isidentifier, usage)) else None


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


_READING: CloudReading[StreamEvent] = CloudReading(
    ends=lambda event: event.data is None,
    text=lambda event: event.text,
    usage=lambda event: _usage(event.data or {}),
)
