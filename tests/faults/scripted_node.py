"""A node and a cloud that speak the real wire formats, from a script. They prove no feature, they make faults."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

EMBEDDER = "all-minilm-l6-v2"
WRITER = "smollm2-135m-instruct"
ANSWER = ["The", " capital", " is", " Paris", "."]


def vectors_for(texts, dimensions=8):
    """Vectors that depend on the text alone, so that order and identity can be checked. float32 (n, d)."""
    rows = [np.random.default_rng(abs(hash(text)) % 2**32).standard_normal(dimensions) for text in texts]
    return np.array(rows, "<f4").reshape(len(texts), dimensions)


def vectors_in(space, texts):
    """The vectors of texts in a space, so that rows of two spaces can be told apart."""
    return vectors_for([f"{space}: {text}" for text in texts])


def done_event():
    """The end of an answer."""
    return {
        "model": WRITER,
        "device": "CPU",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "completion_tokens": len(ANSWER)},
        "timing_ms": {"queue": 0.1, "tokenize": 0.2, "first_token": 1.0, "generate": 2.0, "total": 3.0},
        "npu_busy_delta_us": None,
    }


class ScriptedNode:
    """Set `respond` to an async function of the request that returns a response, or None for the usual answer.

    `embedders` are further embedding models (id: space), whose vectors are `vectors_in` their space; `viewers` are
    models for vision, `failed` those that cannot be loaded, on /health only; `aliases` are further names (alias: id).
    `dimensions` is the length of vectors on /health, `answers` that of its vectors, `answers_as` the model and
    `answers_on` the device that it names in answers.
    """

    def __init__(self, space="space-a"):
        self.space = space
        self.embedders = {}
        self.writers = [WRITER]
        self.viewers = []
        self.failed = []
        self.aliases = {}
        self.dimensions = self.answers = 8
        self.answers_as = None
        self.answers_on = "CPU"
        self.status = "ready"
        self.respond = None
        self.health_respond = None
        self.max_texts = 2048
        self.context_limit = 256
        self.placements = ["CPU"]
        self.requests = []
        self.bodies = []
        self.more_routes = []
        self.probes = 0
        self.token_pause = asyncio.sleep
        self.url = ""
        self._server = None

    @asynccontextmanager
    async def running(self, port=0, tls=None):
        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/embeddings", self._embeddings),
                web.post("/inference", self._inference),
                *self.more_routes,
            ]
        )
        self._server = TestServer(app, host="127.0.0.1", port=port, scheme="https" if tls else "http")
        await self._server.start_server(ssl=tls)
        self.url = str(self._server.make_url("")).rstrip("/")
        try:
            yield self
        finally:
            await self._server.close()

    async def _health(self, request):
        self.probes += 1
        if self.health_respond is not None and (scripted := await self.health_respond(request)) is not None:
            return scripted
        common = {"state": "ready", "device": "CPU", "placements": self.placements, "queue_depth": 0, "in_flight": 0}
        embedders = {EMBEDDER: self.space} | self.embedders
        models = [
            {
                "id": name,
                "kind": "embedding",
                "dimensions": self.dimensions,
                "space": space,
                "context_limit": self.context_limit,
                **common,
            }
            for name, space in embedders.items()
        ]
        models += [{"id": name, "kind": "generation", "context_limit": 8192, **common} for name in self.writers]
        models += [{"id": name, "kind": "vision", "context_limit": 8192, **common} for name in self.viewers]
        models += [{**common, "id": name, "kind": None, "device": None, "state": "failed"} for name in self.failed]
        for model in models:
            model["aliases"] = [alias for alias, name in self.aliases.items() if name == model["id"]]
        body = {
            "status": self.status,
            "version": "test",
            "devices": [{"name": "CPU", "available": True, "emulated": False, "full_name": "scripted", "driver": None}],
            "models": models,
            "npu": {"busy_time_us": None, "memory_bytes": None, "frequency_mhz": None, "utilisation": None},
        }
        return web.json_response(body, status=200 if self.status in {"ready", "degraded"} else 503)

    async def _take(self, request):
        self.requests.append(request)
        body = await request.json()
        self.bodies.append(body)
        scripted = await self.respond(request) if self.respond is not None else None
        return body, scripted

    async def _embeddings(self, request):
        body, scripted = await self._take(request)
        if scripted is not None:
            return scripted
        texts = body["texts"]
        if len(texts) > self.max_texts:
            return error_response(413, "payload_too_large", "too many texts")
        name = body.get("model", EMBEDDER)
        name = self.aliases.get(name, name)
        if name != EMBEDDER and name not in self.embedders:
            return error_response(404, "model_not_found", "no such model")
        space = self.embedders.get(name, self.space)
        vectors = vectors_in(space, texts) if name in self.embedders else vectors_for(texts, self.answers)
        return web.Response(
            body=vectors.tobytes(),
            content_type="application/octet-stream",
            headers=self._route(request, name) | {"X-Shape": ",".join(map(str, vectors.shape)), "X-Space": space},
        )

    async def _inference(self, request):
        body, scripted = await self._take(request)
        if scripted is not None:
            return scripted
        done = done_event() | {"model": self.answers_as or WRITER, "device": self.answers_on}
        if not body.get("stream"):
            return web.json_response({"text": "".join(ANSWER), **done}, headers=self._route(request, WRITER))
        response = web.StreamResponse(
            headers={**self._route(request, WRITER), "Content-Type": "text/event-stream; charset=utf-8"}
        )
        await response.prepare(request)
        for piece in ANSWER:
            await response.write(sse("token", {"text": piece}))
            await self.token_pause(0)
        await response.write(b": still here\n\n" + sse("done", done))
        await response.write_eof()
        return response

    def _route(self, request, model):
        return {
            "X-Request-ID": request.headers["X-Request-ID"],
            "X-Model": self.answers_as or model,
            "X-NPU-Node-Device": self.answers_on,
            "X-NPU-Node-Route-Reason": "preferred",
            "X-NPU-Node-Token-Count": "7",
        }


class ScriptedCloud:
    """An OpenAI-compatible API; `respond` as for the node."""

    def __init__(self, dimensions=8):
        self.dimensions = dimensions
        self.respond = None
        self.requests = []
        self.bodies = []
        self.url = ""

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.add_routes([web.post("/v1/embeddings", self._embeddings), web.post("/v1/chat/completions", self._chat)])
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        self.url = str(server.make_url("/v1"))
        try:
            yield self
        finally:
            await server.close()

    async def _take(self, request):
        self.requests.append(request)
        body = await request.json()
        self.bodies.append(body)
        return body, await self.respond(request) if self.respond is not None else None

    async def _embeddings(self, request):
        body, scripted = await self._take(request)
        if scripted is not None:
            return scripted
        rows = vectors_for(body["input"], self.dimensions).tolist()
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        data.reverse()  # the order is in `index`, and nowhere else
        usage = {"prompt_tokens": 11, "total_tokens": 11}
        return web.json_response({"object": "list", "model": body["model"], "data": data, "usage": usage})

    async def _chat(self, request):
        body, scripted = await self._take(request)
        if scripted is not None:
            return scripted
        usage = {"prompt_tokens": 13, "completion_tokens": 5, "total_tokens": 18}
        common = {"id": "c", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(ANSWER)}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            return web.json_response({**common, "object": "chat.completion", "choices": choices, "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {**common, "object": "chat.completion.chunk"}
        for piece in ANSWER:
            await response.write(data_event({**chunk, "choices": [choice({"content": piece})]}))
        await response.write(data_event({**chunk, "choices": [choice({}, "stop")]}))
        await response.write(data_event({**chunk, "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def choice(delta, reason=None):
    """A choice of a streamed chat completion."""
    return {"index": 0, "delta": delta, "finish_reason": reason}


def data_event(data):
    """An event without a name."""
    return f"data: {json.dumps(data)}\n\n".encode()


def sse(event, data):
    """One server-sent event."""
    return f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


def error_response(status, code, message="no", retry_after_ms=None):
    """An error as nodes send it."""
    headers = {} if retry_after_ms is None else {"Retry-After": "1", "retry-after-ms": str(retry_after_ms)}
    error = {"message": message, "type": "t", "code": code, "param": None}
    return web.json_response({"error": error}, status=status, headers=headers)
