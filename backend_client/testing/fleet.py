"""A fleet of scripted nodes, on real sockets or in memory: there no sockets, no threads, and the client's own code."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from pydantic import SecretStr

from backend_client import sync
from backend_client.client import NPUClient
from backend_client.errors import ConnectionLost, NodeUnreachable
from backend_client.http.messages import Reply, WireCall
from backend_client.http.sse import Event, EventParser
from backend_client.http.transport import Transport
from backend_client.lifetime import LoopThread
from backend_client.settings import ClientSettings
from backend_client.testing.node import NOT_FOUND, PATHS, Answer, FakeNode, Sent, Step, event_bytes


class MemoryTransport(Transport):
    """Carries requests to nodes of this process. `find` gives the node of a URL; None for one that was killed.

    `key` is the API key that nodes see.
    """

    def __init__(self, find: Callable[[str], FakeNode | None], key: str) -> None:
        self._find = find
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def request(
        self,
        node: str,
        method: str,  # noqa: ARG002  (a node has one method for each path)
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        *,
        probe: bool = False,  # noqa: ARG002  (there are no connections to wait for)
    ) -> Reply:
        """See Transport. A stream that was not asked for comes as its bytes."""
        _, answer = await self._answer(node, path, headers, body or b"")
        content = b"".join(event_bytes(*event) for event in answer.events or ())
        return Reply(answer.status, _lower(answer.headers), content or answer.body)

    async def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        """See Transport."""
        step, answer = await self._answer(node, call.path, call.headers("text/event-stream"), call.encoded)
        yield Reply(answer.status, _lower(answer.headers), answer.body)
        parser = EventParser()
        for index, (name, data) in enumerate(answer.events or ()):
            if step is not None and step.kind == "cut" and index == step.after:
                raise ConnectionLost("the connection broke before the answer was complete", node=node)
            # The other calls of the program get their turn between two pieces, as they do over a socket.
            await asyncio.sleep(0)
            if self._find(node) is None:
                raise ConnectionLost("the connection broke before the answer was complete", node=node)
            for event in parser.feed(event_bytes(name, data)):
                yield event

    async def close(self) -> None:
        """Nothing is open."""

    async def _answer(self, url: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[Step | None, Answer]:
        await asyncio.sleep(0)
        node = self._find(url)
        if node is None:
            raise NodeUnreachable("cannot connect: Connection refused", node=url)
        if path == "/health":
            return None, node.health()
        if path not in PATHS:
            return None, NOT_FOUND
        step, answer = node.take(path, {**self._headers, **headers}, body)
        if step is not None and step.kind == "hang":
            await asyncio.get_running_loop().create_future()
        if step is not None and step.kind == "drop":
            raise ConnectionLost("the connection broke before the answer was complete", node=url)
        return step, answer


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


# Scripted nodes on real sockets.


def application(node: FakeNode) -> web.Application:
    """The routes of a node."""

    async def health(_: web.Request) -> web.Response:
        return _whole(node.health())

    async def take(request: web.Request) -> web.StreamResponse:
        step, answer = node.take(request.path, request.headers, await request.read())
        if step is not None and step.kind == "hang":
            await asyncio.get_running_loop().create_future()
        if step is not None and step.kind == "drop" and request.transport is not None:
            request.transport.abort()
        return _whole(answer) if answer.events is None else await _stream(request, answer, step)

    async def unknown(_: web.Request) -> web.Response:
        return _whole(NOT_FOUND)

    app = web.Application(client_max_size=256 * 1024 * 1024)
    app.add_routes([web.get("/health", health), *(web.post(path, take) for path in PATHS)])
    app.add_routes([web.post("/{path:.*}", unknown)])
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


# A fleet of scripted nodes: on loopback, in a thread of its own, or in memory.

_TURNS = 8


class FakeFleet:
    """Use as `with`. `fleet[0]` is a node; `requests` are what all nodes got, oldest first, without health checks.

    With `memory=True` there are no sockets: only clients made by `client()` and `async_client()` reach the nodes.
    """

    def __init__(self, nodes: int = 1, *, dimensions: int = 8, memory: bool = False) -> None:
        self._memory = memory
        self._alive: set[str] = set()
        self.requests: list[Sent] = []
        self.nodes = [FakeNode(self.requests.append, dimensions) for _ in range(nodes)]
        self._runners: dict[int, web.AppRunner] = {}
        self._ports: dict[int, int] = {}
        # Of nodes that were stopped: nobody else gets their port meanwhile.
        self._kept: dict[int, socket.socket] = {}
        self._thread: LoopThread | None = None

    @property
    def urls(self) -> list[str]:
        """The URLs of all nodes."""
        return [node.url for node in self.nodes]

    def settings(self, **values: Any) -> ClientSettings:
        """Settings that name these nodes, which are on sockets."""
        self._reject_memory("settings")
        return ClientSettings.load(**{"nodes": self.urls, **values})

    def environment(self) -> dict[str, str]:
        """Variables that name these nodes, which are on sockets, for `monkeypatch.setenv` or a process."""
        self._reject_memory("environment")
        return {"NPU_CLIENT_NODES": ",".join(self.urls)}

    def client(self, **options: Any) -> sync.NPUClient:
        """A blocking client of these nodes."""
        if not self._memory:
            return sync.NPUClient(self.urls, **options)
        client = sync.NPUClient.__new__(sync.NPUClient)
        sync.Blocking.__init__(client, self.async_client(**options))
        return client

    def async_client(self, **options: Any) -> NPUClient:
        """A client of these nodes for the event loop of the caller."""
        if self._memory:
            key = options.get("api_key") or ""
            text = key.get_secret_value() if isinstance(key, SecretStr) else key
            options["transport"] = lambda: MemoryTransport(self._find, text)
        return NPUClient(self.urls, **options)

    def kill(self, index: int) -> None:
        """Stop a node: its connections break, and new ones are refused."""
        if self._memory:
            self._alive.discard(self.nodes[index].url)
            return
        runner = self._runners.pop(index)
        self._running().run(_end(runner))
        self._kept[index] = _bound(self._ports[index])

    def revive(self, index: int) -> None:
        """Start a node that was stopped, on the same port."""
        if self._memory:
            self._alive.add(self.nodes[index].url)
            return
        if (kept := self._kept.pop(index, None)) is not None:
            kept.close()
        self._running().run(self._start(index))

    def sent(self, path: str | None = None) -> list[Sent]:
        """The requests to a path, or all."""
        return [request for request in self.requests if path in {None, request.path}]

    def assert_sent(self, path: str | None = None, *, times: int | None = None, **fields: Any) -> Sent:
        """Fail unless a request (exactly `times` of them) went to `path` with these fields in its body.

        Returns the last one.
        """
        found = [request for request in self.sent(path) if _has(request.body, fields)]
        wanted = f"{path or 'any path'}{f' with {sorted(fields)}' if fields else ''}"
        if not found or (times is not None and len(found) != times):
            paths = [request.path for request in self.requests]
            raise AssertionError(f"{len(found)} requests to {wanted} were sent, not {times or 'at least 1'}: {paths}")
        return found[-1]

    def assert_nothing_sent(self) -> None:
        """Fail if any request was sent."""
        if self.requests:
            raise AssertionError(f"requests were sent: {[request.path for request in self.requests]}")

    def __getitem__(self, index: int) -> FakeNode:
        return self.nodes[index]

    def __iter__(self) -> Iterator[FakeNode]:
        return iter(self.nodes)

    def __enter__(self) -> Self:
        if self._memory:
            for index, node in enumerate(self.nodes):
                node.url = f"http://fake-node-{index}:8081"
                self._alive.add(node.url)
            return self
        self._thread = LoopThread("fake fleet", self._stop)
        for index in range(len(self.nodes)):
            self._thread.run(self._start(index))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alive.clear()
        while self._kept:
            self._kept.popitem()[1].close()
        if self._thread is not None:
            self._thread.close()

    def _find(self, url: str) -> FakeNode | None:
        return next((node for node in self.nodes if node.url == url and url in self._alive), None)

    def _reject_memory(self, method: str) -> None:
        if self._memory:
            raise RuntimeError(f"{method}() is for nodes on sockets: nodes in memory are reached by client() alone")

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("the fleet does not run: use it as `with FakeFleet() as fleet`")
        return self._thread

    async def _start(self, index: int) -> None:
        runner = web.AppRunner(application(self.nodes[index]), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._ports.get(index, 0))
        await site.start()
        self._runners[index] = runner
        self._ports[index] = runner.addresses[0][1]
        self.nodes[index].url = f"http://127.0.0.1:{self._ports[index]}"

    async def _stop(self) -> None:
        for runner in self._runners.values():
            await _end(runner)


def _bound(port: int) -> socket.socket:
    """A socket that has the port and does not listen: connections are refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held


async def _end(runner: web.AppRunner) -> None:
    # A connection that is being accepted while its listener closes is never closed: let it become the server's first.
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    await runner.cleanup()


def _has(body: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    return all(name in body and body[name] == value for name, value in fields.items())
