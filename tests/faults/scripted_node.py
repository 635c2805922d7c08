"""The fake node and an OpenAI-compatible cloud in the event loop of a test, which may answer in their place."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import numpy as np
from aiohttp import web

from backend_client.testing import FakeCloud, FakeNode, fake_vector, status
from backend_client.testing.fleet import Served, application
from backend_client.testing.node import EMBEDDER, WORD, WRITER, event_bytes, generation, model_row, refusal

ANSWER = WORD.findall("The capital is Paris.")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def vectors_for(texts, dimensions=8):
    """The vectors that nodes and the cloud give texts. float32 (n, d)."""
    return np.array([fake_vector(text, dimensions) for text in texts], "<f4").reshape(len(texts), dimensions)


def vectors_in(space, texts):
    return vectors_for([f"{space}: {text}" for text in texts])


class ScriptedNode(FakeNode):
    """Set `respond` to an async function of the request that returns a response, or None for the usual answer;
    `health_respond` likewise. It has further `routes`, and calls chats with tools `weather`.

    It names the model `answers_as` and the device `answers_on` in its answers, and its vectors have the length
    `answers`, where they are not None.
    """

    def __init__(self, space="space-a", routes=()):
        super().__init__(lambda _: None, 8)
        self.models = {name: self.models[name] for name in (EMBEDDER, WRITER)}
        self.models[EMBEDDER] |= {"space": space, "context_limit": 256}
        self.vector = self._vector
        self.tool_call = "weather", {"city": "Bonn"}
        self.respond = self.health_respond = None
        self.answers = self.answers_as = None
        self.answers_on = "CPU"
        self.requests, self.bodies, self.probes = [], [], 0
        self._routes = routes

    def offer(self, kind, name, **row):
        self.models[name] = model_row(kind) | {"dimensions": 8} | row

    def alias(self, **names):
        for name, row in self.models.items():
            row["aliases"] = [alias for alias, meant in names.items() if meant == name]

    def take(self, path, headers, content):
        told = self.models
        if self.answers is not None:
            self.models = {**told, EMBEDDER: told[EMBEDDER] | {"dimensions": self.answers}}
        step, answer = super().take(path, headers, content)
        self.models = told
        model = self.answers_as or answer.headers.get("X-Model")
        named = {**answer.headers, "X-Model": model, "X-NPU-Node-Device": self.answers_on}
        events = answer.events
        if path == "/inference" and events:
            events = [*events[:-1], ("done", events[-1][1] | {"model": model, "device": self.answers_on or ""})]
        elif events:
            events = [(name, data and data | {"model": model}) for name, data in events]
        return step, replace(answer, headers={name: value for name, value in named.items() if value}, events=events)

    @asynccontextmanager
    async def running(self, port=0, tls=None):
        app = application(self)
        app.middlewares.append(self._instead)
        app.add_routes(self._routes)
        served = await Served.start(app, port, tls)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{served.port}"
        try:
            yield self
        finally:
            await served.end()

    def _vector(self, text, length, space):
        return fake_vector(text if space.startswith(self.space) else f"{space}: {text}", length)

    @web.middleware
    async def _instead(self, request, handler):
        respond = self.health_respond
        if request.path == "/health":
            self.probes += 1
        else:
            self.requests.append(request)
            respond = self.respond
            if request.content_type == "application/json" and request.can_read_body:
                self.bodies.append(await request.json())
        scripted = None if respond is None else await respond(request)
        return await handler(request) if scripted is None else scripted


class ScriptedCloud(FakeCloud):
    """The fake cloud; `respond` as for the node."""

    def __init__(self):
        super().__init__()
        self.respond = None
        self.requests, self.bodies = [], []

    @asynccontextmanager
    async def running(self):
        app = application(self)
        app.middlewares.append(self._instead)
        served = await Served.start(app)
        self.url = f"http://127.0.0.1:{served.port}/v1"
        try:
            yield self
        finally:
            await served.end()

    def _rows(self, body):
        return super()._rows(body)[::-1]  # the order is in `index`, and nowhere else

    @web.middleware
    async def _instead(self, request, handler):
        self.requests.append(request)
        self.bodies.append(await request.json())
        scripted = None if self.respond is None else await self.respond(request)
        return await handler(request) if scripted is None else scripted


@contextmanager
def served_in_thread(node):
    started = threading.Event()
    loops = []
    done = asyncio.Event()

    async def serve():
        loops.append(asyncio.get_running_loop())
        async with node.running():
            started.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(100)
        yield node.url
    finally:
        loops[0].call_soon_threadsafe(done.set)
        thread.join()


def choice(delta, reason=None):
    return {"index": 0, "delta": delta, "finish_reason": reason}


def data_event(data):
    return event_bytes("", data)


def streamed(*events, done=True):
    """An event stream, given its events; of a chat, the end `[DONE]` with `done`."""
    body = b"".join(event if isinstance(event, bytes) else data_event(event) for event in events)
    return web.Response(body=body + data_event(None) * done, content_type="text/event-stream")


sse = event_bytes


def done_event():
    return generation(WRITER, "prompt", ANSWER).events[-1][1]


def answering(make):
    """To be set as `respond`: every request gets what `make` returns."""

    async def respond(_):
        return make()

    return respond


def error_response(http, code, message="no", retry_after_ms=None):
    answer = refusal(status(http, code, retry_after=None if retry_after_ms is None else retry_after_ms / 1000))
    body = answer.body.replace(b'"scripted"', json.dumps(message).encode(), 1)
    return web.Response(status=answer.status, headers=answer.headers, body=body)
