"""Requests of every dialect, byte for byte to the node that the client chooses, and its reply back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from backend_client.arguments import NOT_SENT_ON
from backend_client.arguments import headers as printable
from backend_client.client import InferenceClient
from backend_client.errors import AuthenticationFailed, ModelNotFound, NPUError
from backend_client.fleet.affinity import SESSION_HEADER
from backend_client.gateway.keys import Team
from backend_client.gateway.limits import Limits, Metrics
from backend_client.gateway.spending import Spending
from backend_client.http.errors import Problem, openai_error, refusal_of_node
from backend_client.http.messages import Reply, Request, encode, plain_name, read_form
from backend_client.http.replies import Forwarded, asks_for_stream, passed_on
from backend_client.http.routes import ROUTES, Dialect
from backend_client.lifetime import Deadline, in_daemon_thread
from backend_client.sdk.routes import FAILOVER, OpenAIRoutes, json_object, read_device, read_failover, read_flag

TEAM = web.RequestKey("team", Team)
ID = web.RequestKey("id", str)
# Gateways send it and refuse it: two that name each other as nodes would pass a request back and forth without end.
HOP = "X-NPU-Gateway-Hop"
# Asked of every node: the `models` that each lists are joined by name.
_LISTS = ("/api/tags", "/api/ps")
_SENT_ON = ("x-npu-", "anthropic-", "traceparent", "tracestate", SESSION_HEADER)
_LOOK_S = 5.0
_MILLISECONDS = re.compile(r"[0-9]{1,9}")
# Models of a list in Anthropic's form, as Anthropic documents them.
_PAGE, _LARGEST_PAGE = 20, 1000


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect in which a path, known or not, is answered."""
    if path in ROUTES:
        return ROUTES[path].dialect
    if path.startswith("/v1/messages") or (path.startswith("/v1/models") and "anthropic-version" in headers):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def error_body(dialect: Dialect, error: Problem) -> dict[str, Any]:
    # It may name what the caller sent.
    message = error.message[:1000]
    if dialect == "anthropic":
        kind = _ANTHROPIC.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if dialect == "ollama":
        return {"error": message, "code": error.code}
    return openai_error(error.status, error.code, message, error.param)


def refused(dialect: Dialect, error: Problem) -> web.Response:
    """A refusal as a reply; the client has retried already, so callers need not."""
    status = 529 if dialect == "anthropic" and error.status == 503 else error.status
    response = web.json_response(error_body(dialect, error), status=status)
    response.headers["x-should-retry"] = "false"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
        response.headers["retry-after-ms"] = str(int(error.retry_after * 1000))
    return response


def own_headers(request: web.Request, dialect: Dialect) -> dict[str, str]:
    """The headers of every reply. Anthropic's SDK reads the id of a request from its own header."""
    own = {"X-Request-ID": request[ID], "Server": "npu-gateway"}
    return {**own, "request-id": request[ID]} if dialect == "anthropic" else own


class Forwarder:
    """Answers the requests that are for the fleet. Its handlers raise Problem and NPUError."""

    def __init__(self, client: InferenceClient, metrics: Metrics, limits: Limits, spending: Spending | None) -> None:
        self._client = client
        self._limits = limits
        self._spending = spending
        self._metrics = metrics
        self._lists = OpenAIRoutes(client)

    def routes(self) -> list[web.RouteDef]:
        """All that is served: nodes are asked for these paths and no others."""
        return [
            *(web.post(path, self._admitted(self._forward)) for path in ROUTES),
            web.get("/v1/models", self._admitted(self._models)),
            web.get("/v1/models/{id}", self._admitted(self._models)),
            *(web.get(path, self._admitted(self._joined)) for path in _LISTS),
            web.get("/api/version", self._admitted(self._of_any)),
            web.post("/api/show", self._admitted(self._of_any)),
            web.get("/", self._admitted(_running)),
            web.route("*", "/{path:.*}", self._admitted(_unknown)),
        ]

    def _admitted(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            await self._limits.admit(request[TEAM])
            with self._metrics.in_flight.track_inprogress():
                return await handler(request)

        return handle

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        dialect = ROUTES[request.path].dialect
        asked = await self._asked(request, await request.read())
        try:
            found = await self._answered(asked)
        except AuthenticationFailed as error:
            # The gateway's own key is wrong there: the caller cannot fix it.
            raise Problem(503, "unavailable", error.message) from None
        except NPUError as error:
            if (own := refusal_of_node(error)) is not None:
                return _as_it_came(own)
            if dialect == "ollama" and isinstance(error, ModelNotFound):
                raise _ollama_lacks(asked.model or "") from None
            raise
        source, streamed = found.origin.source, not isinstance(found.content, bytes)
        attempts = len(found.attempts) + streamed
        self._metrics.answers.labels(source).inc()
        headers = {
            **found.headers,
            "X-NPU-Gateway-Source": source,
            "X-NPU-Gateway-Attempts": str(attempts),
        }
        if asked.failover.stream_recovery and asks_for_stream(asked):
            headers["X-NPU-Gateway-Stream-Recovery"] = asked.failover.stream_recovery
        if source == "node":
            headers["X-NPU-Gateway-Node"] = found.origin.node
        try:
            if isinstance(found.content, bytes):
                return web.Response(body=found.content, headers=headers)
            return await self._stream(request, dialect, headers, found.content, asked)
        finally:
            usage, team = found.count.usage, request[TEAM]
            self._metrics.tokens.labels(team.name, "prompt").inc(usage.prompt_tokens)
            self._metrics.tokens.labels(team.name, "completion").inc(usage.completion_tokens)
            await self._limits.used(team, usage.prompt_tokens + usage.completion_tokens)

    async def _answered(self, asked: Request) -> Forwarded:
        try:
            return await self._client.core.backend.forward(asked)
        except ModelNotFound:
            look = Deadline.after(min(_LOOK_S, asked.deadline.remaining()), self._client.core.clock)
            if asked.model is None or not await self._client.npu.fleet.find_in_stores(asked.model, look):
                raise
        return await self._client.core.backend.forward(asked)

    async def _asked(self, request: web.Request, content: bytes) -> Request:
        """The request as the client takes it. Raises RequestRejected, and Problem for what the team may not do."""
        route, team = ROUTES[request.path], request[TEAM]
        fields = await _fields(request, content) if route.upload else json_object(content)
        device = read_device(_only(request, "X-NPU-Require-Device"), "X-NPU-Require-Device")
        local = read_flag(_only(request, "X-NPU-Local-Only"), "X-NPU-Local-Only")
        sent_on = {
            lower: value
            for name, value in request.headers.items()
            if (lower := name.lower()).startswith(_SENT_ON) and lower not in NOT_SENT_ON
        }
        printable(sent_on)
        model = fields.pop("model", None)
        if not isinstance(model, str | None):
            raise _wrong("model", "model must be the name of a model, as a string")
        if not _may_use(team, model):
            named = ", ".join(sorted(team.models))
            message = f"this key is for {named}, and the request names {(model or 'no model')[:100]}"
            raise Problem(403, "forbidden", message)
        defaults = team.failover.over(self._client.npu.options.failover)
        failover = read_failover(_only(request, FAILOVER), defaults)
        if not _may_use(team, failover.on_context_length):
            failover = failover.model_copy(update={"on_context_length": None})
        times = self._client.npu.options.timeouts
        kind = route.kind_of(fields)
        seconds = times.embed if kind in {"embedding", "rerank"} else times.generate
        limit_s, ends = _limit_of(request), None
        if limit_s is not None:
            ends = Deadline.after(limit_s, self._client.core.clock)
            seconds = min(seconds, limit_s)
        deadline = Deadline.after(seconds, self._client.core.clock)
        return Request(
            path=request.path,
            kind=kind,
            body=fields,
            # Nodes have defaults of their own: a request that names no model gets the name of the fleet's.
            content=content if model or route.upload else None,
            content_type=request.headers.get("Content-Type", "application/json"),
            model=model or None,
            deadline=deadline,
            ends=deadline if kind == "transcription" else ends,
            request_id=request[ID],
            priority="batch" if request.headers.get("X-Priority", "").lower() == "batch" else "interactive",
            require_device=device,
            local_only=local or not team.cloud,
            spend_limit=self._spending.limit(team) if self._spending else None,
            extra_headers=sent_on | {HOP: "1"},
            failover=failover,
            tenant=team.name,
        )

    async def _stream(
        self,
        request: web.Request,
        dialect: Dialect,
        headers: dict[str, str],
        parts: AsyncGenerator[bytes, None],
        asked: Request,
    ) -> web.StreamResponse:
        """The parts as they come; a failure in the middle is the last of them, in the form of the dialect.

        A caller who does not read for `timeouts.silence` seconds, or when its stream must have ended, is disconnected.
        """
        ends, silence = asked.end_of_stream(), self._client.npu.options.timeouts.silence

        async def bounded(writing: Awaitable[None]) -> None:
            try:
                async with asyncio.timeout(min(silence, ends.remaining())):
                    await writing
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the caller does not read the stream") from None

        response = web.StreamResponse(headers={**headers, **own_headers(request, dialect)})
        # A caller may leave at any time: the generator's end then cancels the node's request.
        with contextlib.suppress(ConnectionError):
            try:
                await response.prepare(request)
                try:
                    async for part in parts:
                        await bounded(response.write(part))
                except NPUError as error:
                    body = json.dumps(error_body(dialect, Problem(503, "stream_interrupted", error.message)))
                    lines = f"{body}\n" if dialect == "ollama" else f"event: error\ndata: {body}\n\n"
                    if dialect == "openai" and request.path != "/inference":
                        lines = f"data: {body}\n\n"
                    await bounded(response.write(lines.encode()))
                await bounded(response.write_eof())
            finally:
                await parts.aclose()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        """The models that nodes serve now, and those in their stores, which they load on demand."""
        found = await self._rows("/v1/models", "data", "id")
        for row in (await self._lists.models() or {}).get("data", ()):
            found.setdefault(row["id"], row)
        name = request.match_info.get("id")
        if name is not None:
            served = await self._lists.models(name)
            wanted = plain_name(served["id"] if served else name)
            found = {id_: row for id_, row in found.items() if plain_name(id_) == wanted}
        rows = [row for id_, row in found.items() if _may_use(request[TEAM], id_)]
        if "anthropic-version" in request.headers:
            made = "1970-01-01T00:00:00Z"
            rows = [
                {"type": "model", "id": row["id"], "display_name": row["id"], "created_at": made}
                for row in rows
                if row.get("kind") in {"generation", "vision"}
            ]
            if name is None:
                return web.json_response(_anthropic_page(rows, request.query))
        if name is None:
            return web.json_response({"object": "list", "data": rows})
        if not rows:
            raise Problem(404, "model_not_found", f"no node serves the model {name[:100]!r} to this key")
        return web.json_response(rows[0])

    async def _rows(self, path: str, field: str, key: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for _, reply in await self._client.npu.fleet.ask_all("GET", path, b"", Deadline.after(_LOOK_S)):
            with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
                for row in json.loads(reply.body)[field]:
                    found.setdefault(str(row[key]), {**row, key: str(row[key])})
        return found

    async def _joined(self, request: web.Request) -> web.Response:
        rows = await self._rows(request.path, "models", "name")
        return web.json_response({"models": [row for name, row in rows.items() if _may_use(request[TEAM], name)]})

    async def _of_any(self, request: web.Request) -> web.Response:
        """The reply of a node that has one, which says the same as the others."""
        content = b""
        name: str | None = None
        if request.path == "/api/show":
            fields = json_object(await request.read())
            name = str(fields.get("model") or fields.get("name") or "")
            content = encode({"model": name})
            if not _may_use(request[TEAM], name):
                raise _ollama_lacks(name)
        deadline = Deadline.after(_LOOK_S)
        for _, reply in await self._client.npu.fleet.ask_all(request.method, request.path, content, deadline):
            return _as_it_came(reply)
        if name is not None and self._client.npu.healthz().nodes_usable:
            raise _ollama_lacks(name)
        raise Problem(503, "unavailable", "no node has an answer to this")


def _ollama_lacks(model: str) -> Problem:
    # Ollama's clients look for these words.
    return Problem(404, "model_not_found", f"model '{model[:200]}' not found")


def _may_use(team: Team, model: str | None) -> bool:
    return not team.models or (model is not None and model.removesuffix(":latest") in team.models)


async def _running(_: web.Request) -> web.StreamResponse:
    return web.Response(text="npu-gateway is running")


async def _unknown(request: web.Request) -> web.StreamResponse:
    raise Problem(404, "not_found", f"the fleet serves no {request.method} {request.path[:200]}")


async def _fields(request: web.Request, content: bytes) -> dict[str, Any]:
    """The fields of a form, each with its values but for the model. Raises Problem."""
    kind = request.headers.get("Content-Type", "")
    form, _ = await in_daemon_thread(lambda: read_form(content, kind), "read a form")
    models = form.pop("model", [])
    if len(models) > 1:
        raise _wrong("model", "a form must name one model")
    return {**form, "model": models[0] if models else None}


def _only(request: web.Request, name: str) -> str | None:
    """The value of a header. Raises Problem where it is given twice."""
    values = request.headers.getall(name, [])
    if len(values) > 1:
        raise _wrong(name, f"{name} must be given once")
    return values[0] if values else None


def _limit_of(request: web.Request) -> float | None:
    """The seconds that the caller gives the whole request. Raises Problem for what is no time."""
    name = "X-Request-Timeout-Ms"
    given = _only(request, name)
    if given is None:
        return None
    if not _MILLISECONDS.fullmatch(given):
        raise _wrong(name, f"{name} must be a whole number of milliseconds, as 30000")
    return int(given) / 1000


def _wrong(name: str, message: str) -> Problem:
    return Problem(400, "invalid_request", message, param=name)


def _as_it_came(reply: Reply) -> web.Response:
    return web.Response(body=reply.body, status=reply.status, headers=passed_on(reply.headers))


def _anthropic_page(rows: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The models that `limit`, and `after_id` or `before_id`, ask for, as nodes list theirs. Raises Problem."""
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= _LARGEST_PAGE):
        raise _wrong("limit", f"limit: must be a number from 1 to {_LARGEST_PAGE}")
    ids = [row["id"] for row in rows]
    after, before = query.get("after_id"), query.get("before_id")
    for name, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in ids:
            raise _wrong(name, f"{name}: must be the id of a model in this list")
    rows = rows[ids.index(after) + 1 if after is not None else 0 : ids.index(before) if before is not None else None]
    backward = before is not None and after is None
    page = rows[-int(limit) :] if backward else rows[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": page, "has_more": len(page) < len(rows), "first_id": first, "last_id": last}
