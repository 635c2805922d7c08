"""A fleet of fake nodes in memory, for tests in virtual time."""

import asyncio
import functools
import inspect
import json
import random
from contextlib import asynccontextmanager
from typing import NamedTuple

from backend_client import ClientOptions, NPUClient, testing
from backend_client.errors import NodeUnreachable
from backend_client.http.messages import HealthReport, Reply
from backend_client.testing.node import event_bytes, generation, model_row
from tests.unit.backend_client.virtual_time import in_virtual_time

EMBEDDER = "minilm"
WRITER = "smollm"


class Asked(NamedTuple):
    """A request as a node gets it."""

    path: str
    headers: dict
    body: bytes

    @property
    def model(self):
        return json.loads(self.body).get("model")

    @property
    def may_wait(self):
        return self.headers.get("X-NPU-Restart-Wait-Ms") != "0"


class MemoryTransport:
    """Carries requests to nodes without sockets, and therefore on virtual time."""

    def __init__(self, nodes, latency=0.0):
        self.nodes = {node.url: node for node in nodes}
        self.latency = latency
        self.closed = False

    async def request(self, node, method, path, body, headers, *, probe=False):
        await asyncio.sleep(self.latency)
        return _head(self.nodes[node].health() if probe else (await self._take(node, path, headers, body))[1])

    async def parts(self, node, path, body, headers, *, lively):
        _, answer = await self._take(node, path, headers, body)
        yield _head(answer)
        for name, data in answer.events or ():
            await asyncio.sleep(self.latency)
            yield event_bytes(name, data)

    async def close(self):
        self.closed = True

    async def _take(self, node, path, headers, body):
        return self.nodes[node].take(path, headers, body)


def _head(answer):
    return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.body)


def node_of(space, embedder=EMBEDDER):
    node = testing.FakeNode(lambda _: None, 2)
    embedding = model_row("embedding") | {"dimensions": 2, "space": space}
    node.models = {embedder: embedding, WRITER: model_row("generation")}
    node.vector = lambda text, *_: [float(len(text)), 1.0]
    return node


def report(status="ready", *, space="space-a", state="ready", queue=0, device="CPU", placements=("CPU",)):
    node = node_of(space)
    node.health_status = status
    for row in node.models.values():
        row |= {"state": state, "device": device, "placements": placements, "queue_depth": queue}
    return HealthReport.model_validate_json(node.health().body)


class FakeNode:
    """`health`, `embed` and `pieces` may be set to a value, an exception, or an async function of the call.

    `requests` are the virtual times of ordinary requests; `probes` those of /health.
    """

    def __init__(self, url, space="space-a"):
        self.url = url
        self.space = space
        self.requests = []
        self.request_ids = []
        self.probes = []
        self.revive()

    async def vectors(self, call):
        node = node_of(self.space, call.model or EMBEDDER)
        return _head(node.take(call.path, call.headers, call.body)[1])

    def die(self):
        self.health = self.embed = NodeUnreachable("cannot connect", node=self.url)
        self.pieces = [self.embed]

    def freeze(self):
        self.health = self.embed = hang
        self.pieces = [hang]

    def revive(self):
        self.health = report(space=self.space)
        self.embed = self.vectors
        self.pieces = ["Pa", "ris"]


async def hang(*_):
    await asyncio.get_running_loop().create_future()


async def play(script, *args):
    if isinstance(script, BaseException):
        raise script
    return await script(*args) if callable(script) else script


class FakeTransport(MemoryTransport):
    """Carries requests to the fakes, taking `latency` seconds each."""

    def __init__(self, nodes, latency=0.002):
        super().__init__(nodes, latency)

    async def request(self, url, method, path, body, headers, *, probe=False):
        if probe:
            node = self.nodes[url]
            node.probes.append(asyncio.get_running_loop().time())
            await asyncio.sleep(self.latency)
            found = await play(node.health)
            return Reply(200, {}, found.model_dump_json(exclude_unset=True).encode())
        node = await self._arrive(url, headers)
        return await play(node.embed, Asked(path, headers, body))

    async def parts(self, url, path, body, headers, *, lively):
        node, asked = await self._arrive(url, headers), Asked(path, headers, body)
        answer = generation(asked.model or WRITER, "prompt", node.pieces)
        yield _head(answer)
        for name, data in answer.events:
            sent = {"text": await play(data["text"], asked)} if name == "token" else data
            await asyncio.sleep(self.latency)
            yield event_bytes(name, sent)

    async def _arrive(self, url, headers):
        node = self.nodes[url]
        node.requests.append(asyncio.get_running_loop().time())
        node.request_ids.append(headers["X-Request-ID"])
        await asyncio.sleep(self.latency)
        return node


def fleet(count, **options):
    return [FakeNode(f"http://node-{index}:8081", **options) for index in range(count)]


def client_of(nodes, *, seed=1, options=None, **more):
    return NPUClient(
        [node.url for node in nodes],
        transport=lambda: FakeTransport(nodes),
        clock=asyncio.get_running_loop().time,
        rng=random.Random(seed),
        options=options or ClientOptions(),
        **more,
    )


@asynccontextmanager
async def warm(nodes, **more):
    async with client_of(nodes, **more) as client:
        await client.health()
        yield client


def with_fleet(count, **options):
    """Run an async test in virtual time, with so many fake nodes and a client that knows them, of these options."""

    def decorate(test):
        @in_virtual_time
        @functools.wraps(test)
        async def run(*args, **more):
            nodes = fleet(count)
            async with warm(nodes, options=ClientOptions(**options)) as client:
                await test(nodes, client, *args, **more)

        # The other arguments are pytest's to give.
        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][2:])
        return run

    return decorate
