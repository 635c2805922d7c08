"""A fleet of scripted nodes: on loopback, in a thread of its own, or in memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from pydantic import SecretStr

from backend_client import sync
from backend_client._api.loop_thread import LoopThread
from backend_client._api.npu_client import NPUClient
from backend_client.settings import ClientSettings
from backend_client.testing.memory import MemoryTransport
from backend_client.testing.node import FakeNode
from backend_client.testing.sockets import application
from backend_client.testing.steps import Sent

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
