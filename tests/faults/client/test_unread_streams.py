"""A stream that ends before its first read, or is dropped, gives back its node, its connection and its reservation."""

import asyncio
import gc
from contextlib import aclosing

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from backend_client import CloudClient, InferenceClient, NPUClient, sync
from backend_client.http.messages import Request
from backend_client.lifetime import Deadline
from backend_client.observability import Metrics, instrument
from backend_client.sdk.client import openai_over
from backend_client.sdk.routes import stream_bytes
from backend_client.testing.node import WRITER, route_headers
from tests.faults.client.gateways import STREAM, cloud_settings, gateway
from tests.faults.scripted_node import ScriptedNode, choice, data_event, served_in_thread, sse

MESSAGES = [{"role": "user", "content": "Where?"}]


class Endless(ScriptedNode):
    """Streams until its caller leaves; `open` counts the streams under way."""

    def __init__(self):
        super().__init__()
        self.open = 0
        self.respond = self.stream

    async def stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **route_headers(WRITER)})
        await response.prepare(request)
        token = sse("token", {"text": "x"})
        if request.path != "/inference":
            token = data_event({"model": WRITER, "choices": [choice({"content": "x"})]})
        self.open += 1
        try:
            while True:
                await response.write(token)
                await asyncio.sleep(0.01)
        finally:
            self.open -= 1


@pytest.fixture
async def node():
    async with Endless().running() as running:
        yield running


def job(path="/v1/chat/completions", content=None):
    body = {"prompt": "text"} if path == "/inference" else {"messages": MESSAGES, "stream": True}
    return Request(path=path, model=WRITER, body=body, content=content, deadline=Deadline.after(60))


async def sdk_bytes(client):
    return stream_bytes(await client.core.backend.open(job()), with_usage=True)


async def forwarded(client):
    found = await client.core.backend.forward(job(content=b'{"model":"fake-writer","messages":[],"stream":true}'))
    return found.content


def watched(client):
    return instrument(client, metrics=Metrics(CollectorRegistry()))


async def observed(client):
    return await watched(client).core.backend.open(job())


async def observed_bytes(client):
    return await forwarded(watched(client))


KINDS = {
    "fleet": lambda client: client.npu.core.backend.open(job()),
    "fleet and cloud": lambda client: client.core.backend.open(job()),
    "observed": observed,
    "SDK": sdk_bytes,
    "gateway": forwarded,
    "observed gateway": observed_bytes,
}


async def close(stream):
    await stream.aclose()


async def drop(stream):
    """Nothing: the caller forgets it, and the garbage collector finds it."""


async def cancel(stream):
    async def hold(it):
        async with aclosing(it):
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(hold(stream))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition, *, dropped=False):
    if dropped:
        gc.collect()
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", [close, drop, cancel])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_unread_stream_gives_back_its_node(node, kind, end):
    async with InferenceClient(NPUClient([node.url])) as client:
        stream = await KINDS[kind](client)
        assert client.npu.status()[0].in_flight == 1
        await end(stream)
        del stream
        await until(lambda: not node.open, dropped=end is drop)
        assert client.npu.status()[0].in_flight == 0


@pytest.mark.parametrize("end", [close, drop, cancel])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/inference"])
async def test_an_unread_stream_of_the_cloud_settles_its_reservation(cloud, path, end):
    prices = {name: {"input": 1, "output": 1} for name in ("cloud-chat", WRITER)}
    async with CloudClient(cloud_settings(cloud, prices=prices, spend_cap=1, embedding_models={})) as client:
        stream = await client.core.backend.open(job(path))
        assert client.ledger.cloud.calls == 0
        await end(stream)
        del stream
        await until(lambda: client.ledger.cloud.estimated_calls == 1, dropped=end is drop)
        assert client.ledger.left == 1 - client.ledger.cloud.cost > 0


async def test_callers_of_the_sdk_who_press_stop_at_once_leave_nothing_open(node):
    client = InferenceClient(NPUClient([node.url]))
    async with openai_over(client) as openai:
        for _ in range(5):
            stream = await openai.chat.completions.create(model=WRITER, messages=MESSAGES, stream=True)
            await stream.close()
            async with openai.chat.completions.with_streaming_response.create(
                model=WRITER, messages=MESSAGES, stream=True
            ):
                pass
        await until(lambda: not node.open)
        assert client.npu.status()[0].in_flight == 0


def test_the_blocking_sdk_leaves_nothing_open_either():
    node = Endless()
    with served_in_thread(node) as url, sync.openai(nodes=[url]) as openai:
        openai.chat.completions.create(model=WRITER, messages=MESSAGES, stream=True).close()
        asyncio.run(until(lambda: not node.open))


async def test_callers_of_the_gateway_who_leave_at_the_head_leave_nothing_open(node):
    async with gateway(node) as http:
        for _ in range(5):
            async with http.post("/v1/chat/completions", json=STREAM):
                pass
        await until(lambda: not node.open)


async def test_texts_whose_caller_leaves_give_back_their_nodes(scripted):
    asked = asyncio.Event()

    async def respond(_):
        asked.set()
        await asyncio.get_running_loop().create_future()

    scripted.respond = respond
    async with NPUClient([scripted.url]) as client:
        for stream in (client.embed_stream(["text"]), client.stream("prompt"), client.stream_chat(MESSAGES)):
            await stream.aclose()
        call = asyncio.ensure_future(client.embed_many(["text"] * 200))
        await asked.wait()
        assert client.status()[0].in_flight
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.status()[0].in_flight == 0
