"""A reply too many on a connection that is kept alive: it is never taken for the answer to the next request."""

import asyncio
import json

import numpy as np
import pytest

from backend_client import NPUClient
from backend_client.testing import FakeNode
from tests.faults.scripted_node import event_bytes, vectors_for

# What a node does with the id of a request.
REPEAT = "X-Request-ID: {}\r\n"
NONE = ""
OWN = "X-Request-ID: proxy-{}\r\n"


class Doubling:
    """A node that answers correctly, but puts its last reply on a connection once more before the next one there, as
    often as `surplus` says. `identity` is what it does with request ids. `lags`: its own reply comes only with the next
    request on the connection, so that nothing but the id tells that there was one too many.
    """

    def __init__(self, identity=REPEAT, *, lags=False):
        self.identity = identity
        self.lags = lags
        self.surplus = 0
        self.connections = 0
        self.served = 0
        self._writers, self._tasks = [], []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader, writer):
        self._writers.append(writer)
        self._tasks.append(asyncio.current_task())
        before = None
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = head[0].split()[1]
                if path == "/health":
                    writer.write(_reply("application/json", FakeNode(None, 8).health().body))
                    continue
                self.connections += before is None
                self.served += 1
                own = _answer(path, json.loads(body), self.identity.format(headers["x-request-id"]))
                doubled = before is not None and self.surplus > 0
                if doubled:
                    self.surplus -= 1
                    writer.write(before)
                if not doubled or not self.lags:
                    writer.write(own)
                before = own
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def push(self, data):
        """Send `data` on all connections, without a request, and return when it has arrived."""
        for writer in self._writers:
            writer.write(data)
            await writer.drain()
        # A round trip in the same event loop takes longer.
        reader, writer = await asyncio.open_connection(*self._server.sockets[0].getsockname())
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()


def _reply(kind, body, more=""):
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _answer(path, asked, identity):
    node = FakeNode(lambda _: None, 8)
    node.answer = lambda body: body.get("prompt") or body["messages"][0]["content"]
    _, answer = node.take(path, {}, json.dumps(asked).encode())
    headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items() if name != "Content-Type")
    body = answer.body if answer.events is None else b"".join(event_bytes(*event) for event in answer.events)
    return _reply(answer.headers["Content-Type"], body, identity + headers)


async def embed(client, text):
    vector = await client.embed(text)
    return "right" if np.array_equal(np.array(vector, "<f4"), vectors_for([text])[0]) else "wrong"


async def generate(client, text):
    return "right" if (await client.generate(text)).text == text else "wrong"


async def stream(client, text):
    return "right" if "".join([piece async for piece in client.stream(text)]) == text else "wrong"


async def chat(client, text):
    return "right" if (await client.chat([{"role": "user", "content": text}])).text == text else "wrong"


async def count(client, text):
    return "right" if await client.count_tokens("x " * len(text)) == len(text) else "wrong"


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("call", [embed, generate, stream, chat, count])
async def test_a_surplus_reply_is_refused_its_connection_closed_and_the_request_sent_again(call, lags):
    async with Doubling(lags=lags) as node, NPUClient([node.url]) as client:
        assert await call(client, "x") == "right"
        for length in (2, 3):
            node.surplus = 1
            assert await call(client, "x" * length) == "right"
        # Two calls were sent twice, the second time on a new connection; the node is as good as before.
        assert (node.served, node.connections) == (5, 3)
        assert client.status()[0].usable


@pytest.mark.parametrize("identity", [NONE, OWN, REPEAT])
async def test_what_comes_on_a_free_connection_is_no_answer(identity):
    async with Doubling(identity) as node, NPUClient([node.url]) as client:
        assert await embed(client, "one") == "right"
        await node.push(_answer("/embeddings", {"texts": ["another text"]}, NONE))
        result = await client.embed_result("two")
        assert np.array_equal(np.array(result.vector, "<f4"), vectors_for(["two"])[0])
        assert [attempt.outcome for attempt in result.attempts] == ["ok"]
        assert node.connections == 2
