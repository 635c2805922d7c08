"""Nodes in memory that fail in every way a script asks for, behind the client's transport protocol."""

import asyncio
import contextlib
import json
import zlib

import numpy as np

from backend_client.errors import (
    BadReply,
    ConnectionLost,
    ModelMissing,
    NodeFailed,
    NodeNotServing,
    NodeOverloaded,
    NodeUnreachable,
)
from backend_client.http.health import HealthReport
from backend_client.http.messages import EmbedReply, Reply, RouteInfo
from backend_client.http.sse import Event
from tests.unit.backend_client.fakes import done

EMBEDDER, OTHER, WRITER, ALIAS = "minilm", "e5", "smollm", "prod"
SPACES = ["space-a", "space-b", "space-c", "space-d"]
SLOW = 30.0


def now():
    return asyncio.get_running_loop().time()


def vector(text, space):
    """What a node must answer: depends on the text and on the space alone."""
    return [float(zlib.crc32(text.encode()) % 65521), float(SPACES.index(space))]


def answer(prompt):
    """The pieces that a node must answer."""
    return [f"{prompt}:{index} " for index in range(zlib.crc32(prompt.encode()) % 5 + 1)]


class SimNode:
    """One node. `fault` is what ails it now; see `scenario.FAULTS`."""

    def __init__(self, url, rng, *, spaces, alias):
        self.url = url
        self.rng = rng
        self.pace = rng.uniform(0.001, 0.03)
        self.spaces = dict(spaces)
        self.alias = alias
        self.fault = None
        self._epoch = 0
        self._kills = 0
        self._changed = asyncio.Event()

    def set(self, fault):
        """Begin a fault, or end it (None). What is under way notices."""
        self.fault = fault
        if fault in {"dead", "cut"}:
            self._epoch += 1
        self._kills += fault == f"killed {WRITER}"
        self._changed.set()
        self._changed = asyncio.Event()

    def report(self):
        """The body of /health."""
        state = "loading" if self.fault == "loading" else "ready"
        common = {"device": "CPU", "placements": ["CPU"]}
        models = [
            {
                "id": name,
                "kind": "embedding",
                "dimensions": 2,
                "space": space,
                "state": state if name == EMBEDDER else "ready",
                "aliases": [ALIAS] if name == self.alias else [],
                **common,
            }
            for name, space in self.spaces.items()
        ]
        restart = {"state": "loading", "ready_in_s": 2.0} if self.fault == f"killed {WRITER}" else {"state": "ready"}
        models.append({"id": WRITER, "kind": "generation", **restart, **common})
        status = {"loading": "degraded", "draining": "draining"}.get(self.fault, "ready")
        return HealthReport.model_validate({"status": status, "models": models})

    async def health(self):
        """One probe."""
        await self._connect()
        if self.fault == "probes lost" and self.rng.random() < 0.6:
            await self._until_changed()
        await self._work("health", 0.001)
        return self.report()

    async def embed(self, call):
        """One POST /embeddings."""
        name = self._admit(call.model, set(self.spaces))
        await self._work(name, self.pace * (1 + len(call.texts) / 64) * self.rng.lognormvariate(0, 0.3))
        space = self.spaces[name]
        vectors = np.array([vector(text, space) for text in call.texts], np.float32).reshape(-1, 2)
        return EmbedReply(vectors, space, self._route(name))

    async def events(self, call):
        """One POST /inference."""
        name = self._admit(call.model, {WRITER})
        while self.fault == f"killed {WRITER}":
            if not call.may_wait:
                raise NodeNotServing("restarts", node=self.url, status=503, code="engine_unavailable", retry_after=2.0)
            await self._until_changed()
        yield Reply(200, {"x-model": name, "x-npu-node-device": "CPU"})
        for piece in answer(json.loads(call.encoded)["prompt"]):
            await self._work(name, self.pace * self.rng.lognormvariate(0, 0.3))
            yield Event("token", json.dumps({"text": piece}))
        yield done(name, 1)

    def _route(self, name):
        return RouteInfo(name, "CPU", "preferred", 1, None, emulated=False)

    def _admit(self, model, names):
        name = self.alias if model == ALIAS else model
        match self.fault:
            case "busy":
                raise NodeOverloaded("full", node=self.url, status=429, retry_after=self.rng.uniform(0.05, 2.0))
            case "draining":
                raise NodeNotServing("drains", node=self.url, status=503, code="draining")
            case "flaky" if self.rng.random() > 0.5:
                pass
            case "failing" | "flaky":
                raise NodeFailed("boom", node=self.url, status=500)
            case "loading" if name == EMBEDDER:
                raise NodeNotServing("loads", node=self.url, status=503, code="model_loading", retry_after=1.0)
        if name not in names:
            raise ModelMissing("no such model", node=self.url, status=404)
        return name

    async def _connect(self):
        if self.fault == "dead":
            await asyncio.sleep(0.0005)
            raise NodeUnreachable("refused", node=self.url)
        if self.fault == "unroutable":
            await asyncio.sleep(1.0)
            raise NodeUnreachable("no answer in time", node=self.url)

    async def _work(self, name, seconds):
        """Take that long, and longer or for ever while a fault says so."""
        epoch, kills, left = self._epoch, self._kills, seconds
        while True:
            if self._kills != kills and name == WRITER:
                raise NodeNotServing("died", node=self.url, code="engine_unavailable")
            if self._epoch != epoch:
                raise ConnectionLost("reset", node=self.url)
            if self.fault == "broken" and name != "health":
                raise self.rng.choice([ConnectionLost, BadReply])("broken", node=self.url)
            if left <= 0:
                return
            if self.fault in {"frozen", f"hung {name}"}:
                await self._until_changed()
                continue
            slow = SLOW if self.fault == "slow" and name != "health" else 1.0
            began = now()
            left = left - (now() - began) / slow if await self._until_changed(left * slow) else 0.0

    async def _until_changed(self, seconds=None):
        """Whether the fault changed within that time."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await changed.wait()
        return changed.is_set()


class SimTransport:
    """Counts what is under way, what was sent, and what nodes cannot serve, or not yet (`misrouted`)."""

    def __init__(self, nodes):
        self.nodes = {node.url: node for node in nodes}
        self.under_way = 0
        self.misrouted = 0
        self.sent = []
        self.closed = False

    @contextlib.contextmanager
    def _counted(self):
        self.under_way += 1
        try:
            yield
        except (ModelMissing, NodeNotServing) as error:
            self.misrouted += not isinstance(error, NodeNotServing) or error.code == "model_loading"
            raise
        finally:
            self.under_way -= 1

    async def health(self, url):
        with self._counted():
            return await self.nodes[url].health()

    async def embed(self, url, call):
        with self._counted():
            await self._arrive(url, call)
            return await self.nodes[url].embed(call)

    async def events(self, url, call):
        with self._counted():
            await self._arrive(url, call)
            async with contextlib.aclosing(self.nodes[url].events(call)) as items:
                async for item in items:
                    yield item

    async def close(self):
        self.closed = True

    async def _arrive(self, url, call):
        await self.nodes[url]._connect()
        self.sent.append((now(), url, call.request_id))
