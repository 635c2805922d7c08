"""OpenAI's HTTP API over a client: requests of an unmodified SDK become calls, their results its replies."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend_client import arguments
from backend_client.calls import BaseClient
from backend_client.errors import (
    DeadlineExceeded,
    NPUError,
    NPUUnavailableError,
    RequestRejected,
)
from backend_client.http.errors import openai_error, problem_of, refusal_of_node
from backend_client.http.messages import ModelReport, Request, plain_name, plain_texts, read_form
from backend_client.http.replies import passed_on
from backend_client.http.routes import ROUTES, hides_usage
from backend_client.http.stream_forms import EventStream, StreamEvent
from backend_client.lifetime import STARTED, Deadline, OneLoop, in_daemon_thread, owning
from backend_client.options import FailoverOptions
from backend_client.results import EmbedBatch, Origin, RawReply

FAILOVER = "X-NPU-Failover"
_NOT_STREAMED = (None, False, 0, "", "false", "False", "0")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_DEVICES = ("NPU", "GPU", "CPU")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(slots=True)
class HttpReply:
    """A reply for the SDK: `content` whole, or as it comes."""

    status: int
    headers: dict[str, str]
    content: bytes | AsyncGenerator[bytes, None] = field(repr=False)


class OpenAIRoutes:
    def __init__(self, client: BaseClient) -> None:
        self._core = client.core

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout: float | None
    ) -> HttpReply:
        """The reply to a request, be it a refusal. Raises DeadlineExceeded, and ConfigurationError.

        The key in the request counts nothing: nodes get the client's own.
        """
        headers = {name.lower(): value for name, value in headers.items()}
        try:
            if method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
                name = path.removeprefix("/v1/models").strip("/")
                found = await self.models(name or None)
                if found is None:
                    return error_reply(404, "model_not_found", f"no node serves the model {name[:100]!r}")
                return json_reply(200, found)
            route = ROUTES.get(path)
            if method != "POST" or route is None or not route.sdk:
                return error_reply(404, "not_found", f"the fleet serves no {method} {path[:200]}")
            options = _options(headers, self._core.options.failover)
            if not route.upload:
                return await self._send(path, options, timeout, json_object(body))
            # A recording is in memory whole, so that another node can get it while none has replied.
            kind = headers.get("content-type", "")
            form, file = await in_daemon_thread(lambda: read_form(body, kind), "read a form")
            fields = {**form, "model": _first(form.get("model"))}
            return await self._send(path, options, timeout, fields, file=file)
        except DeadlineExceeded:
            raise
        except (RequestRejected, NPUUnavailableError) as error:
            return refusal(error)

    async def _send(
        self,
        path: str,
        options: dict[str, Any],
        timeout: float | None,
        fields: dict[str, Any],
        *,
        file: tuple[str, bytes] | None = None,
    ) -> HttpReply:
        times, route = self._core.options.timeouts, ROUTES[path]
        default = times.embed if route.form is None else times.generate
        deadline = Deadline.after(default if timeout is None else timeout, self._core.clock)
        hidden = hides_usage(path, fields)
        _take_options(fields, options)
        stream = _first(fields.get("stream")) not in _NOT_STREAMED
        if not stream or file is None:
            fields.pop("stream", None)
        if path == "/v1/embeddings" and (texts := plain_texts(fields)) is not None:
            plain = Request(path="/embeddings", kind="embedding", body={"texts": texts}, deadline=deadline, **options)
            return embedding_reply(await self._core.backend.embed(plain), fields.get("encoding_format"))
        kind = route.kind_of(fields)
        request = Request(
            path=path,
            kind=kind,
            body=fields,
            file=file,
            deadline=deadline,
            # The SDK's timeout is one of silence, so it does not end a stream in the middle.
            ends=deadline if kind == "transcription" else None,
            **options,
        )
        if not stream:
            return whole_reply(await self._core.backend.send(request))
        events = await self._core.backend.open(request)
        kept = {"content-type": "text/event-stream; charset=utf-8", "x-request-id": request.request_id}
        return HttpReply(200, kept, OneLoop(stream_bytes(events, with_usage=not hidden)))

    async def models(self, name: str | None = None) -> dict[str, Any] | None:
        """All models of the fleet as OpenAI lists them, or the one of that name; None where no node has it."""
        found: dict[str, ModelReport] = {}
        for report in await self._core.nodes.models():
            found.setdefault(report.id, report)
        if name is None:
            return {"object": "list", "data": [_model(report.id, report) for report in found.values()]}
        for report in found.values():
            if plain_name(name) in map(plain_name, (report.id, *report.aliases)):
                return _model(report.id, report)
        return None


def _model(name: str, report: ModelReport) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "npu-node", "kind": report.kind}


def _options(headers: Mapping[str, str], failover: FailoverOptions) -> dict[str, Any]:
    """What the headers of a request say to the client, given its own `failover`; further `X-` headers are sent on."""
    given, options = dict(headers), dict[str, Any]()
    request_id = given.pop("x-request-id", "")
    if _REQUEST_ID.fullmatch(request_id):
        options["request_id"] = request_id
    if given.pop("x-priority", "").lower() == "batch":
        options["priority"] = "batch"
    options["require_device"] = read_device(given.pop("x-npu-require-device", None), "X-NPU-Require-Device")
    options["local_only"] = read_flag(given.pop("x-npu-local-only", None), "X-NPU-Local-Only")
    given.pop("x-request-timeout-ms", None)
    options["failover"] = read_failover(given.pop(FAILOVER.lower(), None), failover)
    options["extra_headers"] = {
        name: value for name, value in given.items() if name.startswith("x-") and not name.startswith("x-stainless-")
    }
    arguments.headers(options["extra_headers"])
    return options


def _take_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Take the client's options out of a body, or a form, whose values are lists. A device there goes before the
    header's; `local_only` in either of them holds.
    """
    local, device = (_first(fields.pop(name, None)) for name in ("local_only", "require_device"))
    model = fields.pop("model", None)
    options["local_only"] |= read_flag(local, "local_only")
    options["require_device"] = read_device(device, "require_device") or options["require_device"]
    if not isinstance(model, str | None):
        raise RequestRejected("model: its name is a string", status=400, code="invalid_request", param="model")
    options["model"] = model or None


def _first(value: Any) -> Any:
    """The value of a form's field, which is a list, or of JSON's."""
    return value[0] if isinstance(value, list) and value else value


def read_device(value: object, name: str) -> str | None:
    """A device of a header, a form or JSON; None where it is not given."""
    found = None if value is None else str(value).strip().upper()
    if found not in {None, *_DEVICES}:
        raise _wrong(name, " or ".join(_DEVICES))
    return found


def read_flag(value: object, name: str) -> bool:
    """A flag of a header, a form or JSON; False where it is not given."""
    found = False if value is None else _FLAGS.get(str(value).strip().lower())
    if found is None:
        raise _wrong(name, "true or false")
    return found


def read_failover(value: str | None, defaults: FailoverOptions) -> FailoverOptions:
    """The options of a header over these."""
    try:
        return FailoverOptions.read(value or "").over(defaults)
    except ValueError as error:
        raise _wrong(FAILOVER, str(error)) from None


def _wrong(name: str, known: str) -> RequestRejected:
    return RequestRejected(f"{name} must be {known}", status=400, code="invalid_request", param=name)


def _reject_constant(_: str) -> None:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError


def json_object(body: bytes) -> dict[str, Any]:
    data = None
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(body, parse_constant=_reject_constant)
    if not isinstance(data, dict):
        raise RequestRejected("the body is not a JSON object", status=400, code="invalid_request")
    return data


def embedding_body(batch: EmbedBatch, encoding: object) -> dict[str, Any]:
    """Vectors in OpenAI's form, as lists or as base64."""
    rows: list[Any] = (
        [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in batch.vectors]
        if encoding == "base64"
        else batch.vectors.tolist()
    )
    tokens = batch.usage.prompt_tokens
    return {
        "object": "list",
        "model": batch.model,
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def embedding_reply(batch: EmbedBatch, encoding: object) -> HttpReply:
    reply = _of_origin(json_reply(200, embedding_body(batch, encoding)), batch)
    reply.headers["x-space"] = batch.space
    return reply


def whole_reply(reply: RawReply) -> HttpReply:
    if not isinstance(reply.body, bytes):
        return _of_origin(json_reply(reply.status, reply.body), reply)
    kind = reply.headers.get("content-type", "application/octet-stream")
    return _of_origin(HttpReply(reply.status, {"content-type": kind}, reply.body), reply)


def _of_origin(reply: HttpReply, origin: Origin) -> HttpReply:
    reply.headers = {**passed_on(origin.headers), **reply.headers, "x-request-id": origin.request_id}
    return reply


@owning
async def stream_bytes(events: EventStream, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    """The events for the SDK. A failure in the middle is its last event: the SDK raises it as an APIError."""
    try:
        yield STARTED
        async for item in events:
            if isinstance(item, StreamEvent) and (with_usage or not item.only_usage):
                yield item.encode()
    except NPUError as error:
        fields = {"message": error.message, "type": "server_error", "code": "stream_interrupted", "param": None}
        yield StreamEvent("message", {"error": fields}).encode()
    finally:
        await events.aclose()


def refusal(error: NPUError) -> HttpReply:
    """The node's own refusal where it is one; else ours, with the status that the SDK knows for it."""
    if (own := refusal_of_node(error)) is not None:
        headers = {"content-type": "application/json", **passed_on(own.headers), "x-should-retry": "false"}
        if error.request_id:
            headers["x-request-id"] = error.request_id
        return HttpReply(own.status, headers, own.body)
    problem = problem_of(error)
    reply = error_reply(problem.status, problem.code, problem.message, problem.param)
    if problem.retry_after is not None:
        reply.headers["retry-after-ms"] = str(int(problem.retry_after * 1000))
    return reply


def error_reply(status: int, code: str, message: str, param: str | None = None) -> HttpReply:
    """An error of ours, in the form of OpenAI's API."""
    reply = json_reply(status, openai_error(status, code, message, param))
    # The client has retried already, within its budget.
    reply.headers["x-should-retry"] = "false"
    return reply


def json_reply(status: int, body: Any) -> HttpReply:
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return HttpReply(status, {"content-type": "application/json"}, content)
