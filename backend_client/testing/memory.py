"""Scripted nodes in memory: no sockets, no threads, and the client's own code down to its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from backend_client._protocol.node_api import NodeApi
from backend_client._protocol.sse import Event, EventParser
from backend_client._protocol.wire import Reply, WireCall
from backend_client.errors import ConnectionLost, NodeUnreachable
from backend_client.testing.answers import NOT_FOUND, Answer, event_bytes
from backend_client.testing.node import PATHS, FakeNode
from backend_client.testing.steps import Step


class MemoryTransport(NodeApi):
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
    ) -> tuple[int, Mapping[str, str], bytes]:
        """See NodeApi. A stream that was not asked for comes as its bytes."""
        _, answer = await self._answer(node, path, headers, body or b"")
        content = b"".join(event_bytes(*event) for event in answer.events or ())
        return answer.status, answer.headers, content or answer.body

    async def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        """See NodeApi."""
        step, answer = await self._answer(node, call.path, call.headers("text/event-stream"), call.encoded)
        headers = {name.lower(): value for name, value in answer.headers.items()}
        if answer.status != 200:
            call.refused = Reply(answer.status, headers, answer.body)
            raise self.refusal(node, answer.status, answer.headers, answer.body, call)
        yield Reply(200, headers, answer.body)
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
