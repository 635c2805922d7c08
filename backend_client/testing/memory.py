"""Fake nodes in memory: without sockets, and therefore on virtual time, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable

from backend_client.errors import ConnectionLost
from backend_client.http.messages import Reply, WireCall
from backend_client.http.sse import Event
from backend_client.http.transport import Transport
from backend_client.testing.node import Answer, FakeNode, Step


class MemoryTransport(Transport):
    """Carries requests to the nodes, taking `latency` seconds for each reply and each event."""

    def __init__(self, nodes: Iterable[FakeNode], latency: float = 0.0) -> None:
        self.nodes = {node.url: node for node in nodes}
        self.latency = latency
        self.closed = False

    async def request(
        self, node: str, method: str, path: str, body: bytes | None, headers: dict[str, str], *, probe: bool = False
    ) -> Reply:
        await asyncio.sleep(self.latency)
        if probe and method == "GET":
            return _head(self.nodes[node].health())
        _, answer = await self._take(node, path, headers, body)
        return _head(answer)

    async def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        step, answer = await self._take(node, call.path, call.headers(), call.encoded)
        yield _head(answer)
        for index, (name, data) in enumerate(answer.events or ()):
            await asyncio.sleep(self.latency)
            if step is not None and step.kind == "cut" and index == step.after:
                raise ConnectionLost("scripted", node=node)
            yield Event(name or "message", "[DONE]" if data is None else json.dumps(data))

    async def close(self) -> None:
        self.closed = True

    async def _take(
        self, node: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[Step | None, Answer]:
        step, answer = self.nodes[node].take(path, headers, body or b"")
        if step is not None and step.kind == "hang":
            await asyncio.get_running_loop().create_future()
        if step is not None and step.kind == "drop":
            raise ConnectionLost("scripted", node=node)
        return step, answer


def _head(answer: Answer) -> Reply:
    return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.body)
