"""A fleet of scripted nodes on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from aiohttp import web

from backend_client import sync
from backend_client.client import NPUClient
from backend_client.http.stream_forms import CHAT
from backend_client.lifetime import LoopThread
from backend_client.settings import ClientSettings
from backend_client.testing.node import (
    NOT_FOUND,
    SPACE,
    WORD,
    WRITER,
    Answer,
    FakeNode,
    Scripted,
    Sent,
    Step,
    chat,
    event_bytes,
    fake_vector,
    json_answer,
    put_together,
)


def application(server: Scripted) -> web.Application:
    """The routes of a node or of the cloud."""

    async def take(request: web.Request) -> web.StreamResponse:
        step, answer = server.take(request.path, request.headers, await request.read())
        if step is not None and step.kind == "hang":
            await asyncio.get_running_loop().create_future()
        if step is not None and step.kind == "drop" and request.transport is not None:
            request.transport.abort()
        return _whole(answer) if answer.events is None else await _stream(request, answer, step)

    async def other(request: web.Request) -> web.Response:
        return _whole(server.get(request.path) if request.method == "GET" else NOT_FOUND)

    app = web.Application(client_max_size=256 * 1024 * 1024)
    app.add_routes(web.post(path, take) for path in server.paths)
    app.router.add_route("*", "/{path:.*}", other)
    return app


def _whole(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


async def _stream(request: web.Request, answer: Answer, step: Step | None) -> web.StreamResponse:
    response = web.StreamResponse(headers=answer.headers)
    # The caller may leave at any time, as callers of nodes do.
    with contextlib.suppress(ConnectionResetError):
        await response.prepare(request)
        for index, (name, data) in enumerate(answer.events or ()):
            if step is not None and step.kind == "cut" and index == step.after and request.transport is not None:
                request.transport.abort()
                return response
            await response.write(event_bytes(name, data))
        await response.write_eof()
    return response


_TURNS = 8


@dataclass(frozen=True, slots=True)
class Served:
    """An application on a port of loopback."""

    runner: web.AppRunner
    listener: socket.socket

    @classmethod
    async def start(cls, app: web.Application, port: int = 0, tls: ssl.SSLContext | None = None) -> Self:
        """Serve it; port 0 takes a free one."""
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", port))
        await web.SockSite(runner, listener, ssl_context=tls).start()
        return cls(runner, listener)

    @property
    def port(self) -> int:
        """What it listens on."""
        return int(self.listener.getsockname()[1])

    async def end(self) -> None:
        """Break its connections, and refuse new ones."""
        # asyncio never closes a connection that it is accepting while the listener closes: it accepts no more, then
        # ends. The loop of Windows cannot be told.
        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().remove_reader(self.listener)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await self.runner.cleanup()


class Recording:
    """`requests` are what was sent, oldest first."""

    requests: list[Sent]

    def sent(self, path: str | None = None) -> list[Sent]:
        """The requests to a path, or all."""
        return [request for request in self.requests if path in {None, request.path}]

    def assert_sent(self, path: str | None = None, *, times: int | None = None, **fields: Any) -> Sent:
        """Fail unless a request (exactly `times` of them) went to `path` with these fields in its body.

        Returns the last one.
        """
        found = [request for request in self.sent(path) if request.body.items() >= fields.items()]
        wanted = f"{path or 'any path'}{f' with {sorted(fields)}' if fields else ''}"
        if not found or (times is not None and len(found) != times):
            paths = [request.path for request in self.requests]
            raise AssertionError(f"{len(found)} requests to {wanted} were sent, not {times or 'at least 1'}: {paths}")
        return found[-1]

    def assert_nothing_sent(self) -> None:
        """Fail if any request was sent."""
        if self.requests:
            raise AssertionError(f"requests were sent: {[request.path for request in self.requests]}")


class FakeFleet(Recording):
    """Use as `with`. `fleet[0]` is a node; `requests` are what all nodes got, oldest first, without health checks."""

    def __init__(self, nodes: int = 1, *, dimensions: int = 8) -> None:
        self.requests = []
        self.nodes = [FakeNode(self.requests.append, dimensions) for _ in range(nodes)]
        self._served: dict[int, Served] = {}
        self._ports: dict[int, int] = {}
        # Of nodes that were stopped: nobody else gets their port meanwhile.
        self._kept: dict[int, socket.socket] = {}
        self._thread: LoopThread | None = None

    @property
    def urls(self) -> list[str]:
        """The URLs of all nodes."""
        return [node.url for node in self.nodes]

    def settings(self, **values: Any) -> ClientSettings:
        """Settings that name these nodes."""
        return ClientSettings.load(**{"nodes": self.urls, **values})

    def environment(self) -> dict[str, str]:
        """Variables that name these nodes, for `monkeypatch.setenv` or a process."""
        return {"NPU_CLIENT_NODES": ",".join(self.urls)}

    def client(self, **options: Any) -> sync.NPUClient:
        """A blocking client of these nodes."""
        return sync.NPUClient(self.urls, **options)

    def async_client(self, **options: Any) -> NPUClient:
        """A client of these nodes for the event loop of the caller."""
        return NPUClient(self.urls, **options)

    def kill(self, index: int) -> None:
        """Stop a node: its connections break, and new ones are refused. One that is stopped stays so."""
        thread, index = self._running(), range(len(self.nodes))[index]
        if (served := self._served.pop(index, None)) is not None:
            thread.run(served.end())
            self._kept[index] = _bound(self._ports[index])

    def revive(self, index: int) -> None:
        """Start a node that was stopped, on the same port. One that runs stays as it is."""
        thread, index = self._running(), range(len(self.nodes))[index]
        if (kept := self._kept.pop(index, None)) is not None:
            kept.close()
            thread.run(self._start(index))

    def __getitem__(self, index: int) -> FakeNode:
        return self.nodes[index]

    def __iter__(self) -> Iterator[FakeNode]:
        return iter(self.nodes)

    def __enter__(self) -> Self:
        self._thread = LoopThread("fake fleet", self._stop)
        for index in range(len(self.nodes)):
            self._thread.run(self._start(index))
        return self

    def __exit__(self, *_: object) -> None:
        while self._kept:
            self._kept.popitem()[1].close()
        if self._thread is not None:
            self._thread.close()

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("the fleet does not run: use it as `with FakeFleet() as fleet`")
        return self._thread

    async def _start(self, index: int) -> None:
        served = await Served.start(application(self.nodes[index]), self._ports.get(index, 0))
        self._served[index], self._ports[index] = served, served.port
        self.nodes[index].url = f"http://127.0.0.1:{served.port}"

    async def _stop(self) -> None:
        for served in self._served.values():
            await served.end()


def _bound(port: int) -> socket.socket:
    """A socket that has the port and does not listen: connections are refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held


# What the cloud calls its models.
CLOUD_WRITER, CLOUD_EMBEDDER = "fake-cloud-writer", "fake-cloud-embedder"


class FakeCloud(Scripted, Recording):
    """An OpenAI-compatible cloud: chats, whole and streamed, and embeddings. Use as `with`.

    `answer` is the text of all chats, or a function of the request's body. `usage` are the tokens of the prompt and of
    the answer that every reply reports; None reports none. `vector` makes the vector of a text, given its length.
    """

    paths = ("/v1/chat/completions", "/v1/embeddings")

    def __init__(self, *, dimensions: int = 8) -> None:
        self.requests = []
        super().__init__(self.requests.append)
        self.dimensions = dimensions
        self.answer: str | Callable[[Mapping[str, Any]], str] = "The capital is Paris."
        self.usage: tuple[int, int] | None = (13, 5)
        self.vector: Callable[[str, int], npt.ArrayLike] = fake_vector
        self._thread: LoopThread | None = None
        self._served: Served | None = None

    def settings(self, **values: Any) -> dict[str, Any]:
        """For `cloud` of the settings: it serves chats and embeddings of fake nodes, too."""
        return {
            "api_key": "sk-fake",
            "base_url": self.url,
            "chat_model": CLOUD_WRITER,
            "chat_models": {WRITER: CLOUD_WRITER},
            "embedding_models": {SPACE: CLOUD_EMBEDDER},
            **values,
        }

    def environment(self, **values: Any) -> dict[str, str]:
        """Variables that name this cloud as the fallback, for `monkeypatch.setenv` or a process."""
        return {"NPU_CLIENT_CLOUD": json.dumps(self.settings(**values))}

    def _reply(self, path: str, body: Mapping[str, Any]) -> Answer:
        usage = None
        if self.usage is not None:
            prompt, written = self.usage if path == "/v1/chat/completions" else (self.usage[0], 0)
            usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        if path == "/v1/embeddings":
            return json_answer({"object": "list", "model": body["model"], "data": self._rows(body), "usage": usage})
        text = self.answer if isinstance(self.answer, str) else self.answer(body)
        pieces: list[dict[str, Any]] = [{"content": piece} for piece in WORD.findall(text) or [text]]
        asked = not body.get("stream") or (body.get("stream_options") or {}).get("include_usage")
        answer = chat(body["model"], pieces, "stop", usage if asked else None)
        return answer if body.get("stream") else put_together(answer, CHAT)

    def _rows(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        rows = np.array([self.vector(text, body.get("dimensions", self.dimensions)) for text in texts], "<f4")
        packed = body.get("encoding_format") == "base64"
        return [
            {"object": "embedding", "index": index, "embedding": _base64(row) if packed else row.tolist()}
            for index, row in enumerate(rows)
        ]

    def __enter__(self) -> Self:
        self._thread = LoopThread("fake cloud", self._stop)
        self._thread.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.close()

    async def _start(self) -> None:
        self._served = await Served.start(application(self))
        self.url = f"http://127.0.0.1:{self._served.port}/v1"

    async def _stop(self) -> None:
        if self._served is not None:
            await self._served.end()


def _base64(row: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(row.tobytes()).decode()
