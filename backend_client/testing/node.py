"""One scripted node: it answers as nodes do, except where its script says otherwise."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from aiohttp import web

EMBEDDER, WRITER = "fake-embedder", "fake-writer"
_WORD = re.compile(r"\S+\s*")


def fake_vector(text: str, dimensions: int = 8) -> npt.NDArray[np.float32]:
    """The vector that fake nodes give a text: float32 (dimensions,) of length 1, the same in every process."""
    seed = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big")
    vector = np.random.default_rng(seed).standard_normal(dimensions)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Step:
    """What a node does with one request instead of answering it; see `status`, `drop`, `hang` and `cut`."""

    kind: Literal["status", "drop", "hang", "cut"]
    status: int = 503
    code: str = ""
    retry_after: float | None = None
    after: int = 0


def status(http: int, code: str = "internal_error", *, retry_after: float | None = None) -> Step:
    """Answer with this status and code; `retry_after` in seconds."""
    return Step("status", http, code, retry_after)


def drop() -> Step:
    """Close the connection without an answer."""
    return Step("drop")


def hang() -> Step:
    """Never answer."""
    return Step("hang")


def cut(after: int) -> Step:
    """Break a stream off after so many pieces."""
    return Step("cut", after=after)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that a node got. The names of its headers are in lower case."""

    node: str
    path: str
    body: Mapping[str, Any] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


class FakeNode:
    """`answer` is the text of all generations, or a function of the request's body; `space` that of its vectors.

    `tool_call` is the name and the arguments of a tool call that answers chats with tools.
    """

    def __init__(self, record: Callable[[Sent], None], dimensions: int) -> None:
        self.url = ""
        self.space = "fake-space"
        self.answer: str | Callable[[Mapping[str, Any]], str] = "The capital is Paris."
        self.tool_call: tuple[str, Mapping[str, Any]] | None = None
        self.health_status = "ready"
        self._record = record
        self._dimensions = dimensions
        self._steps: deque[Step | None] = deque()

    def script(self, *steps: Step | None) -> None:
        """What to do with the next requests, one after another; None answers one. Afterwards all are answered."""
        self._steps.extend(steps)

    def application(self) -> web.Application:
        """The node's routes."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/embeddings", self._embeddings),
                web.post("/inference", self._inference),
                web.post("/v1/chat/completions", self._chat),
                web.post("/tokenize", self._tokenize),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        common: dict[str, Any] = {"state": "ready", "device": "CPU", "placements": ["CPU"], "context_limit": 8192}
        embedder = {"id": EMBEDDER, "kind": "embedding", "dimensions": self._dimensions, "space": self.space}
        models = [{**embedder, **common}, {"id": WRITER, "kind": "generation", **common}]
        serving = self.health_status in {"ready", "degraded"}
        body = {"status": self.health_status, "version": "fake", "models": models if serving else []}
        return web.json_response(body, status=200 if serving else 503)

    async def _take(self, request: web.Request) -> tuple[dict[str, Any], Step | None, web.Response | None]:
        """The body of a request, its step, and the reply of one that is not to be answered."""
        body: dict[str, Any] = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self._record(Sent(self.url, request.path, body, headers))
        step = self._steps.popleft() if self._steps else None
        if step is None or step.kind == "cut":
            return body, step, None
        if step.kind == "hang":
            await asyncio.get_running_loop().create_future()
        if step.kind == "drop" and request.transport is not None:
            request.transport.abort()
        waits = {} if step.retry_after is None else {"retry-after-ms": str(int(step.retry_after * 1000))}
        error = {"message": "scripted", "type": "scripted", "code": step.code, "param": None}
        return body, step, web.json_response({"error": error}, status=step.status, headers=waits)

    async def _embeddings(self, request: web.Request) -> web.Response:
        body, _, refusal = await self._take(request)
        if refusal is not None:
            return refusal
        rows = [fake_vector(text, self._dimensions) for text in body["texts"]]
        vectors = np.array(rows, "<f4").reshape(len(rows), self._dimensions)
        headers = {"X-Shape": f"{len(rows)},{self._dimensions}", "X-Space": self.space, **self._route(EMBEDDER)}
        return web.Response(body=vectors.tobytes(), content_type="application/octet-stream", headers=headers)

    async def _inference(self, request: web.Request) -> web.StreamResponse:
        body, step, refusal = await self._take(request)
        if refusal is not None:
            return refusal
        pieces = self._pieces(body)
        usage = {"prompt_tokens": len(_WORD.findall(body["prompt"])), "completion_tokens": len(pieces)}
        end = {"model": WRITER, "device": "CPU", "finish_reason": "stop", "usage": usage}
        events: list[tuple[str, Any]] = [("token", {"text": piece}) for piece in pieces]
        return await self._stream(request, [*events, ("done", end)], step)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, step, refusal = await self._take(request)
        if refusal is not None:
            return refusal
        deltas: list[dict[str, Any]] = [{"content": piece} for piece in self._pieces(body)]
        reason = "stop"
        if self.tool_call is not None and body.get("tools"):
            name, arguments = self.tool_call
            function = {"name": name, "arguments": json.dumps(arguments)}
            deltas = [{"tool_calls": [{"index": 0, "id": "call_fake", "type": "function", "function": function}]}]
            reason = "tool_calls"
        head: dict[str, Any] = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 0, "model": WRITER}
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": reason})
        prompt = len(_WORD.findall(json.dumps(body["messages"])))
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": len(deltas),
            "total_tokens": prompt + len(deltas),
        }
        events: list[tuple[str, Any]] = [("", {**head, "choices": [choice]}) for choice in choices]
        return await self._stream(request, [*events, ("", {**head, "choices": [], "usage": usage}), ("", None)], step)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body, _, refusal = await self._take(request)
        text = body.get("prompt") or json.dumps(body.get("messages"))
        return refusal or web.json_response({"count": len(_WORD.findall(text)), "max_model_len": 8192})

    async def _stream(
        self, request: web.Request, events: Sequence[tuple[str, Any]], step: Step | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self._route(WRITER)})
        await response.prepare(request)
        for index, (name, data) in enumerate(events):
            if step is not None and index == step.after and request.transport is not None:
                request.transport.abort()
                return response
            text = "[DONE]" if data is None else json.dumps(data)
            await response.write((f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode())
        await response.write_eof()
        return response

    def _pieces(self, body: Mapping[str, Any]) -> list[str]:
        text = self.answer if isinstance(self.answer, str) else self.answer(body)
        return _WORD.findall(text) or [text]

    def _route(self, model: str) -> dict[str, str]:
        return {"X-Model": model, "X-NPU-Node-Device": "CPU", "X-NPU-Node-Route-Reason": "fake"}
