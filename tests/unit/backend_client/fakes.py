"""A fleet of scripted nodes behind the transport protocol, for tests in virtual time."""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import numpy as np

from backend_client import ClientOptions, NPUClient
from backend_client.errors import NodeUnreachable
from backend_client.http.health import HealthReport
from backend_client.http.messages import EmbedReply, Reply, RouteInfo
from backend_client.http.sse import Event

EMBEDDER = "minilm"
WRITER = "smollm"


def report(status="ready", *, space="space-a", state="ready", queue=0, device="CPU", placements=("CPU",)):
    """A /health body."""
    common = {"state": state, "device": device, "placements": placements, "queue_depth": queue}
    return HealthReport.model_validate(
        {
            "status": status,
            "models": [
                {"id": EMBEDDER, "kind": "embedding", "dimensions": 2, "space": space, **common},
                {"id": WRITER, "kind": "generation", **common},
            ],
        }
    )


class FakeNode:
    """`health`, `embed` and `generate` may be set to a value, an exception, or an async function of the call.

    `requests` are the virtual times of ordinary requests; `probes` those of /health.
    """

    def __init__(self, url, space="space-a"):
        self.url = url
        self.space = space
        self.health = report(space=space)
        self.embed = self.vectors
        self.pieces = ["Pa", "ris"]
        self.requests = []
        self.request_ids = []
        self.probes = []

    async def vectors(self, call):
        vectors = np.array([[float(len(text)), 1.0] for text in call.texts], np.float32)
        route = RouteInfo(call.model or EMBEDDER, "CPU", "preferred", sum(map(len, call.texts)), None, emulated=False)
        return EmbedReply(vectors, self.space, route)

    def die(self):
        """Refuse connections, as a dead process does."""
        self.health = self.embed = NodeUnreachable("cannot connect", node=self.url)
        self.pieces = [self.embed]

    def freeze(self):
        """Accept connections and never answer, as a stopped process does."""
        self.health = self.embed = hang
        self.pieces = [hang]

    def revive(self):
        """Work again."""
        self.health = report(space=self.space)
        self.embed = self.vectors
        self.pieces = ["Pa", "ris"]


def done(model, tokens):
    """The last event of an answer of /inference."""
    usage = {"prompt_tokens": 5, "completion_tokens": tokens}
    return Event("done", json.dumps({"model": model, "device": "CPU", "finish_reason": "stop", "usage": usage}))


async def hang(*_):
    await asyncio.get_running_loop().create_future()


async def play(script, *args):
    if isinstance(script, BaseException):
        raise script
    return await script(*args) if callable(script) else script


class FakeTransport:
    """Carries requests to the fakes, taking `latency` seconds each."""

    def __init__(self, nodes, latency=0.002):
        self.nodes = {node.url: node for node in nodes}
        self.latency = latency
        self.closed = False

    async def health(self, url):
        node = self.nodes[url]
        node.probes.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.latency)
        return await play(node.health)

    async def embed(self, url, call):
        node = await self._arrive(url, call)
        return await play(node.embed, call)

    async def events(self, url, call):
        node = await self._arrive(url, call)
        model = call.model or WRITER
        yield Reply(200, {"x-model": model, "x-npu-node-device": "CPU"})
        for piece in list(node.pieces):
            text = await play(piece, call)
            await asyncio.sleep(self.latency)
            yield Event("token", json.dumps({"text": text}))
        yield done(model, len(node.pieces))

    async def close(self):
        self.closed = True

    async def _arrive(self, url, call):
        node = self.nodes[url]
        node.requests.append(asyncio.get_running_loop().time())
        node.request_ids.append(call.request_id)
        await asyncio.sleep(self.latency)
        return node


def fleet(count, **options):
    """That many fake nodes."""
    return [FakeNode(f"http://node-{index}:8081", **options) for index in range(count)]


def client_of(nodes, *, seed=1, options=None, **more):
    """A client of the fakes, on the running loop's clock."""
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
    """A client that knows its nodes."""
    async with client_of(nodes, **more) as client:
        await client.health()
        yield client
