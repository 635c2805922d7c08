"""Replies to the OpenAI SDK: results, streams and errors of a client as OpenAI's API has them."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend_client.errors import AuthenticationFailed, CloudError, FleetOverloaded, NPUError, RequestRejected
from backend_client.http.messages import Exchange
from backend_client.http.stream_forms import EventStream, StreamEvent
from backend_client.lifetime import OneLoop
from backend_client.results import EmbedBatch, RawReply

# About a connection, not about the reply.
_HOP = frozenset({"content-length", "transfer-encoding", "content-encoding", "connection", "keep-alive", "date"})


@dataclass(slots=True)
class HttpReply:
    """A reply for the SDK: `content` whole, or as it comes."""

    status: int
    headers: dict[str, str]
    content: bytes | AsyncIterator[bytes] = field(repr=False)


def embedding_reply(batch: EmbedBatch, encoding: object) -> HttpReply:
    """Vectors, as lists or as base64."""
    rows: list[Any] = (
        [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in batch.vectors]
        if encoding == "base64"
        else batch.vectors.tolist()
    )
    tokens = batch.usage.prompt_tokens
    body = {
        "object": "list",
        "model": batch.model,
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    reply = json_reply(200, body)
    reply.headers |= {**_kept(batch.headers), "x-space": batch.space, "x-request-id": batch.request_id}
    return reply


def whole_reply(reply: RawReply) -> HttpReply:
    """A reply that came whole."""
    if isinstance(reply.body, bytes):
        kind = reply.headers.get("content-type", "application/octet-stream")
        return HttpReply(reply.status, {**_kept(reply.headers), "content-type": kind}, reply.body)
    found = json_reply(reply.status, reply.body)
    found.headers |= {**_kept(reply.headers), "content-type": "application/json", "x-request-id": reply.request_id}
    return found


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in _HOP and name != "content-type"}


def streamed(job: Exchange, events: EventStream, *, with_usage: bool) -> HttpReply:
    """A reply whose events are sent as they come."""
    headers = {"content-type": "text/event-stream; charset=utf-8", "x-request-id": job.request_id}
    return HttpReply(200, headers, OneLoop(_stream(events, with_usage=with_usage)))


async def _stream(events: EventStream, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    """The events for the SDK. A failure in the middle is its last event: the SDK raises it as an APIError."""
    try:
        async for item in events:
            if isinstance(item, StreamEvent) and (with_usage or not _only_usage(item)):
                yield item.encode()
    except NPUError as error:
        fields = {"message": error.message, "type": "server_error", "code": "stream_interrupted", "param": None}
        yield StreamEvent("message", {"error": fields}).encode()
    finally:
        await events.aclose()


def _only_usage(event: StreamEvent) -> bool:
    return event.data is not None and event.data.get("choices") == [] and event.data.get("usage") is not None


def refusal(error: NPUError, refused: list[Any]) -> HttpReply:
    """The node's own refusal where it is one; else ours, with the status that the SDK knows for it."""
    if isinstance(error, RequestRejected):
        if refused and 400 <= refused[-1].status < 500 and not isinstance(error, CloudError):
            last = refused[-1]
            kind = last.headers.get("content-type", "application/json")
            headers = {**_kept(last.headers), "content-type": kind, "x-should-retry": "false"}
            return HttpReply(last.status, headers, last.body)
        status = 401 if isinstance(error, AuthenticationFailed) else error.status or 400
        return error_reply(status, error.code or "invalid_request", error.message, error.param)
    if isinstance(error, FleetOverloaded):
        reply = error_reply(429, "overloaded", error.message)
    else:
        reply = error_reply(503, "unavailable", error.message)
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        reply.headers["retry-after-ms"] = str(int(retry_after * 1000))
    return reply


def error_reply(status: int, code: str, message: str, param: str | None = None) -> HttpReply:
    """An error of ours, in the form of OpenAI's API."""
    # The client has retried already, within its budget.
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    reply = json_reply(status, {"error": {"message": message, "type": kind, "code": code, "param": param}})
    reply.headers["x-should-retry"] = "false"
    return reply


def json_reply(status: int, body: Any) -> HttpReply:
    """A reply that is JSON."""
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return HttpReply(status, {"content-type": "application/json"}, content)
