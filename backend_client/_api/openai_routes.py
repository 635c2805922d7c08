"""OpenAI's HTTP API over a client: requests of an unmodified SDK become calls, their results its replies."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend_client._api.client_base import ClientBase
from backend_client._protocol.dialect import FORMS, StreamEvent
from backend_client._protocol.forms import read_form
from backend_client._protocol.jobs import EmbedJob, EventStream, Exchange
from backend_client._protocol.report import ModelKind, ModelReport
from backend_client._resilience.deadline import Deadline
from backend_client._resilience.threads import in_daemon_thread
from backend_client.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    FleetOverloaded,
    NPUError,
    NPUUnavailableError,
    RequestRejected,
)
from backend_client.results import EmbedBatch, RawReply

_KINDS: Mapping[str, ModelKind] = {"/v1/embeddings": "embedding", "/v1/rerank": "rerank", "/v2/rerank": "rerank"}
_WHOLE = frozenset({"/v1/embeddings", "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize"})
_UPLOADS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
# Values of form fields, which are lists: replies that are not JSON.
_PLAIN = [["text"], ["srt"], ["vtt"]]
_TRUE = [["true"], ["1"]]
_STORED = re.compile(r"/v1/responses/[\w-]{1,128}(/input_items|/cancel)?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_DEVICES = frozenset({"NPU", "GPU", "CPU"})
# About a connection, not about the reply.
_HOP = frozenset({"content-length", "transfer-encoding", "content-encoding", "connection", "keep-alive", "date"})


@dataclass(slots=True)
class HttpReply:
    """A reply for the SDK: `content` whole, or as it comes."""

    status: int
    headers: dict[str, str]
    content: bytes | AsyncIterator[bytes] = field(repr=False)


class OpenAIRoutes:
    """Answers requests of OpenAI's API with a client. `models` gives the reports of the fleet's models."""

    def __init__(self, client: ClientBase) -> None:
        self._client = client

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout: float | None
    ) -> HttpReply:
        """The reply to a request, be it a refusal. Raises DeadlineExceeded, and ConfigurationError.

        The key in the request counts nothing: nodes get the client's own.
        """
        options = _options(headers)
        refused: list[Any] = []
        try:
            if method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
                return await self._models(path.removeprefix("/v1/models").strip("/"))
            if method != "POST" or _STORED.fullmatch(path):
                return await self._stored(method, path, options, timeout, refused)
            if path in _UPLOADS:
                return await self._upload(path, headers, body, options, timeout, refused)
            data = _json_object(body)
            if path in FORMS or path in _WHOLE:
                return await self._post(path, data, options, timeout, refused)
            return _error(404, "not_found", f"the fleet serves no {path}")
        except DeadlineExceeded:
            raise
        except (RequestRejected, NPUUnavailableError) as error:
            return _refusal(error, refused)

    async def _post(
        self, path: str, data: dict[str, Any], options: dict[str, Any], timeout: float | None, refused: list[Any]
    ) -> HttpReply:
        stream = bool(data.pop("stream", False))
        model = data.pop("model", None)
        default = self._client.core.options.timeouts
        seconds = timeout if timeout is not None else default.generate if path in FORMS else default.embed
        deadline = Deadline.after(seconds, self._client.core.clock)
        options["model"] = model if isinstance(model, str) and model else None
        if path == "/v1/embeddings" and (texts := _plain_texts(data)) is not None:
            batch = await self._client.core.backend.embed(EmbedJob(texts=texts, deadline=deadline, **options))
            return _embedding_reply(batch, data.get("encoding_format"))
        job = Exchange(
            path=path, kind=_KINDS.get(path, "generation"), body=data, deadline=deadline, refused=refused, **options
        )
        if not stream:
            return _whole_reply(await self._client.core.backend.exchange(job))
        events = await self._client.core.backend.open_exchange(job)
        asked = data.get("stream_options")
        usage = path not in {"/v1/chat/completions", "/v1/completions"}
        usage = usage or (isinstance(asked, dict) and bool(asked.get("include_usage")))
        headers = {"content-type": "text/event-stream; charset=utf-8", "x-request-id": job.request_id}
        return HttpReply(200, headers, _stream(events, with_usage=usage))

    async def _upload(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        options: dict[str, Any],
        timeout: float | None,
        refused: list[Any],
    ) -> HttpReply:
        """A recording. It is in memory whole, so that another node can get it while none has replied."""
        seconds = timeout if timeout is not None else self._client.core.options.timeouts.generate
        deadline = Deadline.after(seconds, self._client.core.clock)
        kind = {name.lower(): value for name, value in headers.items()}.get("content-type", "")
        fields, file = await in_daemon_thread(lambda: read_form(body, kind), "read a form")
        options["model"] = fields.pop("model", [""])[0] or None
        plain = fields.get("response_format") in _PLAIN or fields.get("stream") in [["true"], ["1"]]
        job = Exchange(
            path=path,
            kind="transcription",
            body=fields,
            file=file,
            deadline=deadline,
            refused=refused,
            check=lambda found: isinstance(found, bytes) if plain else _transcribed(found),
            **options,
        )
        return _whole_reply(await self._client.core.backend.exchange(job))

    async def _stored(
        self, method: str, path: str, options: dict[str, Any], timeout: float | None, refused: list[Any]
    ) -> HttpReply:
        if method not in {"GET", "POST", "DELETE"} or not _STORED.fullmatch(path):
            return _error(404, "not_found", f"the fleet serves no {method} {path}")
        seconds = timeout if timeout is not None else self._client.core.options.timeouts.embed
        deadline = Deadline.after(seconds, self._client.core.clock)
        job = Exchange(path=path, method=method, deadline=deadline, refused=refused, **options)
        return _whole_reply(await self._client.core.backend.exchange(job))

    async def _models(self, wanted: str) -> HttpReply:
        reports = await self._client.core.backend.models()
        found: dict[str, ModelReport] = {}
        for report in reports:
            found.setdefault(report.id, report)
        if not wanted:
            return _json(200, {"object": "list", "data": [_model(report.id, report) for report in found.values()]})
        for report in found.values():
            if wanted.lower() in {name.lower() for name in (report.id, *report.aliases)}:
                return _json(200, _model(report.id, report))
        return _error(404, "model_not_found", f"no node serves the model {wanted[:100]!r}")


def _model(name: str, report: ModelReport) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "npu-node", "kind": report.kind}


def _options(headers: Mapping[str, str]) -> dict[str, Any]:
    """What the headers of a request say to the client; further `X-` headers are sent on."""
    given = {name.lower(): value for name, value in headers.items()}
    options: dict[str, Any] = {}
    request_id = given.pop("x-request-id", "")
    if _REQUEST_ID.fullmatch(request_id):
        options["request_id"] = request_id
    if given.pop("x-priority", "").lower() == "batch":
        options["priority"] = "batch"
    device = given.pop("x-npu-require-device", "").upper()
    if device in _DEVICES:
        options["require_device"] = device
    given.pop("x-request-timeout-ms", None)
    options["extra_headers"] = {
        name: value for name, value in given.items() if name.startswith("x-") and not name.startswith("x-stainless-")
    }
    return options


def _json_object(body: bytes) -> dict[str, Any]:
    data = None
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(body)
    if not isinstance(data, dict):
        raise RequestRejected("the body is not a JSON object", status=400, code="invalid_request")
    return data


def _plain_texts(data: Mapping[str, Any]) -> list[str] | None:
    """The texts of an embedding request that asks for nothing else; None for any other."""
    given = data.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return None
    if {name for name, value in data.items() if value is not None} - {"input", "encoding_format", "user"}:
        return None
    return texts if data.get("encoding_format") in {None, "float", "base64"} else None


def _embedding_reply(batch: EmbedBatch, encoding: object) -> HttpReply:
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
    reply = _json(200, body)
    reply.headers |= {**_kept(batch.headers), "x-space": batch.space, "x-request-id": batch.request_id}
    return reply


def _transcribed(body: Any) -> bool:
    return isinstance(body, dict) and isinstance(body.get("text"), str)


def _whole_reply(reply: RawReply) -> HttpReply:
    if isinstance(reply.body, bytes):
        kind = reply.headers.get("content-type", "application/octet-stream")
        return HttpReply(reply.status, {**_kept(reply.headers), "content-type": kind}, reply.body)
    found = _json(reply.status, reply.body)
    found.headers |= {**_kept(reply.headers), "content-type": "application/json", "x-request-id": reply.request_id}
    return found


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in _HOP and name != "content-type"}


async def _stream(events: EventStream, *, with_usage: bool) -> AsyncIterator[bytes]:
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


def _refusal(error: NPUError, refused: list[Any]) -> HttpReply:
    """The node's own refusal where it is one; else ours, with the status that the SDK knows for it."""
    if isinstance(error, RequestRejected):
        if refused and 400 <= refused[-1].status < 500:
            last = refused[-1]
            kind = last.headers.get("content-type", "application/json")
            headers = {**_kept(last.headers), "content-type": kind, "x-should-retry": "false"}
            return HttpReply(last.status, headers, last.body)
        status = 401 if isinstance(error, AuthenticationFailed) else error.status or 400
        return _error(status, error.code or "invalid_request", error.message, error.param)
    if isinstance(error, FleetOverloaded):
        reply = _error(429, "overloaded", error.message)
    else:
        reply = _error(503, "unavailable", error.message)
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        reply.headers["retry-after-ms"] = str(int(retry_after * 1000))
    return reply


def _error(status: int, code: str, message: str, param: str | None = None) -> HttpReply:
    # The client has retried already, within its budget.
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    reply = _json(status, {"error": {"message": message, "type": kind, "code": code, "param": param}})
    reply.headers["x-should-retry"] = "false"
    return reply


def _json(status: int, body: Any) -> HttpReply:
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return HttpReply(status, {"content-type": "application/json"}, content)
