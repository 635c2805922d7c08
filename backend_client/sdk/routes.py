"""OpenAI's HTTP API over a client: requests of an unmodified SDK become calls, their results its replies."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from backend_client import arguments
from backend_client.calls import BaseClient
from backend_client.errors import (
    DeadlineExceeded,
    NPUUnavailableError,
    RequestRejected,
)
from backend_client.http.forms import read_form, writing_kind
from backend_client.http.health import ModelKind, ModelReport
from backend_client.http.messages import EmbedJob, Exchange
from backend_client.http.stream_forms import FORMS, form_of
from backend_client.lifetime import Deadline, in_daemon_thread
from backend_client.sdk.replies import (
    HttpReply,
    embedding_reply,
    error_reply,
    json_reply,
    refusal,
    streamed,
    whole_reply,
)

_KINDS: Mapping[str, ModelKind] = {"/v1/embeddings": "embedding", "/v1/rerank": "rerank", "/v2/rerank": "rerank"}
_WHOLE = frozenset({"/v1/embeddings", "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize"})
_UPLOADS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
# Values of form fields, which are lists.
_FALSE = [["false"], ["False"], ["0"]]
_STORED = re.compile(r"/v1/responses/[\w-]{1,128}(/input_items|/cancel)?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_DEVICES = ("NPU", "GPU", "CPU")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class OpenAIRoutes:
    """Answers requests of OpenAI's API with a client. `models` gives the reports of the fleet's models."""

    def __init__(self, client: BaseClient) -> None:
        self._client = client

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout: float | None
    ) -> HttpReply:
        """The reply to a request, be it a refusal. Raises DeadlineExceeded, and ConfigurationError.

        The key in the request counts nothing: nodes get the client's own.
        """
        refused: list[Any] = []
        try:
            options = _options(headers)
            if method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
                return await self._models(path.removeprefix("/v1/models").strip("/"))
            if method != "POST" or _STORED.fullmatch(path):
                return await self._stored(method, path, options, timeout, refused)
            if path in _UPLOADS:
                return await self._upload(path, headers, body, options, timeout, refused)
            data = _json_object(body)
            if path in FORMS or path in _WHOLE:
                return await self._post(path, data, options, timeout, refused)
            return error_reply(404, "not_found", f"the fleet serves no {path}")
        except DeadlineExceeded:
            raise
        except (RequestRejected, NPUUnavailableError) as error:
            return refusal(error, refused)

    async def _post(
        self, path: str, data: dict[str, Any], options: dict[str, Any], timeout: float | None, refused: list[Any]
    ) -> HttpReply:
        _take_options(data, options)
        stream = bool(data.pop("stream", False))
        model = data.pop("model", None)
        default = self._client.core.options.timeouts
        seconds = timeout if timeout is not None else default.generate if path in FORMS else default.embed
        deadline = Deadline.after(seconds, self._client.core.clock)
        if not isinstance(model, str | None):
            raise RequestRejected("model: its name is a string", status=400, code="invalid_request", param="model")
        options["model"] = model or None
        if path == "/v1/embeddings" and (texts := _plain_texts(data)) is not None:
            batch = await self._client.core.backend.embed(EmbedJob(texts=texts, deadline=deadline, **options))
            return embedding_reply(batch, data.get("encoding_format"))
        job = Exchange(
            path=path,
            kind=_KINDS.get(path) or writing_kind(data),
            body=data,
            deadline=deadline,
            refused=refused,
            **options,
        )
        if not stream:
            return whole_reply(await self._client.core.backend.exchange(job))
        events = await self._client.core.backend.open_exchange(job)
        asked = data.get("stream_options")
        usage = path not in {"/v1/chat/completions", "/v1/completions"}
        usage = usage or (isinstance(asked, dict) and bool(asked.get("include_usage")))
        return streamed(job, events, with_usage=usage)

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
        _take_options(fields, options)
        if fields.get("stream") in _FALSE:
            fields.pop("stream", None)
        job = Exchange(
            path=path,
            kind="transcription",
            body=fields,
            file=file,
            deadline=deadline,
            refused=refused,
            **options,
        )
        if form_of(job) is None:
            return whole_reply(await self._client.core.backend.exchange(job))
        return streamed(job, await self._client.core.backend.open_exchange(job), with_usage=True)

    async def _stored(
        self, method: str, path: str, options: dict[str, Any], timeout: float | None, refused: list[Any]
    ) -> HttpReply:
        if method not in {"GET", "POST", "DELETE"} or not _STORED.fullmatch(path):
            return error_reply(404, "not_found", f"the fleet serves no {method} {path}")
        seconds = timeout if timeout is not None else self._client.core.options.timeouts.embed
        deadline = Deadline.after(seconds, self._client.core.clock)
        job = Exchange(path=path, method=method, deadline=deadline, refused=refused, **options)
        return whole_reply(await self._client.core.backend.exchange(job))

    async def _models(self, wanted: str) -> HttpReply:
        reports = await self._client.core.nodes.models()
        found: dict[str, ModelReport] = {}
        for report in reports:
            found.setdefault(report.id, report)
        if not wanted:
            return json_reply(200, {"object": "list", "data": [_model(report.id, report) for report in found.values()]})
        for report in found.values():
            if wanted.lower() in {name.lower() for name in (report.id, *report.aliases)}:
                return json_reply(200, _model(report.id, report))
        return error_reply(404, "model_not_found", f"no node serves the model {wanted[:100]!r}")


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
    options["require_device"] = _device(given.pop("x-npu-require-device", None), "X-NPU-Require-Device")
    options["local_only"] = _flag(given.pop("x-npu-local-only", None), "X-NPU-Local-Only")
    given.pop("x-request-timeout-ms", None)
    options["extra_headers"] = {
        name: value for name, value in given.items() if name.startswith("x-") and not name.startswith("x-stainless-")
    }
    arguments.headers(options["extra_headers"])
    return options


def _take_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Take the client's options out of a body, or a form, whose values are lists. A device there goes before the
    header's; `local_only` in either of them holds.
    """
    local, device = (
        value[0] if isinstance(value := fields.pop(name, None), list) and value else value
        for name in ("local_only", "require_device")
    )
    options["local_only"] |= _flag(local, "local_only")
    options["require_device"] = _device(device, "require_device") or options["require_device"]


def _device(value: object, name: str) -> str | None:
    """A device of a header, a form or JSON; None where it is not given."""
    found = None if value is None else str(value).strip().upper()
    if found not in {None, *_DEVICES}:
        raise _wrong(name, " or ".join(_DEVICES))
    return found


def _flag(value: object, name: str) -> bool:
    """A flag of a header, a form or JSON; False where it is not given."""
    found = False if value is None else _FLAGS.get(str(value).strip().lower())
    if found is None:
        raise _wrong(name, "true or false")
    return found


def _wrong(name: str, known: str) -> RequestRejected:
    return RequestRejected(f"{name} must be {known}", status=400, code="invalid_request", param=name)


def _reject_constant(_: str) -> None:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError


def _json_object(body: bytes) -> dict[str, Any]:
    data = None
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(body, parse_constant=_reject_constant)
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
