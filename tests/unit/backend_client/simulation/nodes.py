"""Fake nodes in memory that fail in every way a script asks for."""

import asyncio
import contextlib
import json
import zlib

from backend_client.errors import BadReply, ConnectionLost, NodeNotServing, NodeUnreachable
from backend_client.testing import FakeNode, status
from backend_client.testing.node import model_row
from tests.unit.backend_client.fakes import MemoryTransport

EMBEDDER, OTHER, WRITER, ALIAS = "minilm", "e5", "smollm", "prod"
SPACES = ["space-a", "space-b", "space-c", "space-d"]
SLOW = 30.0


def now():
    return asyncio.get_running_loop().time()


def vector(text, space):
    """What a node must answer: depends on the text and on the space alone."""
    return [float(zlib.crc32(text.encode()) % 65521), float(SPACES.index(space))]


def answer(prompt):
    number = zlib.crc32(prompt.encode())
    return [f"{number}:{index} " for index in range(number % 5 + 1)]


class SimNode(FakeNode):
    """One node. `fault` is what ails it now; see `scenario.FAULTS`."""

    def __init__(self, url, rng, *, spaces, alias):
        super().__init__(lambda _: None, 2)
        self.url = url
        self.rng = rng
        self.pace = rng.uniform(0.001, 0.03)
        self.models = {name: model_row("embedding") | {"dimensions": 2, "space": spaces[name]} for name in spaces}
        self.models[WRITER] = model_row("generation")
        self.vector = lambda text, _, space: vector(text, space)
        self.answer = lambda body: "".join(answer(body["prompt"]))
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

    def health(self):
        for name, row in self.models.items():
            row["aliases"] = [ALIAS] if name == self.alias else []
        self.models[EMBEDDER]["state"] = "loading" if self.fault == "loading" else "ready"
        killed = self.fault == f"killed {WRITER}"
        self.models[WRITER] |= {"state": "loading", "ready_in_s": 2.0} if killed else {"state": "ready"}
        self.health_status = {"loading": "degraded", "draining": "draining"}.get(self.fault, "ready")
        return super().health()

    async def probed(self):
        """What a probe goes through."""
        await self.connect()
        if self.fault == "probes lost" and self.rng.random() < 0.6:
            await self._until_changed()
        await self.work("health", 0.001)

    def named(self, model):
        return self.alias if model == ALIAS else model

    async def refusal(self, name, *, may_wait):
        while self.fault == f"killed {WRITER}" and name == WRITER:
            if not may_wait:
                return status(503, "engine_unavailable", retry_after=2.0)
            await self._until_changed()
        fault = self.fault
        if fault == "flaky":
            fault = None if self.rng.random() > 0.5 else "failing"
        elif fault == "loading" and name != EMBEDDER:
            fault = None
        wait = self.rng.uniform(0.05, 2.0)
        return {
            "busy": status(429, "overloaded", retry_after=wait),
            "draining": status(503, "draining"),
            "failing": status(500),
            "loading": status(503, "model_loading", retry_after=1.0),
        }.get(fault)

    async def connect(self):
        if self.fault == "dead":
            await asyncio.sleep(0.0005)
            raise NodeUnreachable("refused", node=self.url)
        if self.fault == "unroutable":
            await asyncio.sleep(1.0)
            raise NodeUnreachable("no answer in time", node=self.url)

    async def work(self, name, seconds):
        """Take that long at this node's random pace, and longer, or without end, while a fault is active."""
        epoch, kills, left = self._epoch, self._kills, seconds * self.rng.lognormvariate(0, 0.3)
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
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await changed.wait()
        return changed.is_set()


class SimTransport(MemoryTransport):
    """Counts what is under way, what was sent, and what nodes cannot serve, or not yet (`misrouted`)."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.under_way = 0
        self.misrouted = 0
        self.sent = []

    @contextlib.contextmanager
    def _counted(self):
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    async def request(self, node, method, path, body, headers, *, probe=False):
        with self._counted():
            if probe:
                await self.nodes[node].probed()
            return await super().request(node, method, path, body, headers, probe=probe)

    async def parts(self, node, path, body, headers, *, lively):
        with self._counted():
            async with contextlib.aclosing(super().parts(node, path, body, headers, lively=lively)) as items:
                async for item in items:
                    if isinstance(item, bytes) and item.startswith(b"event: token"):
                        await self.nodes[node].work(WRITER, self.nodes[node].pace)
                    yield item

    async def _take(self, url, path, headers, body):
        node, asked = self.nodes[url], json.loads(body)
        await node.connect()
        self.sent.append((now(), url, headers["X-Request-ID"]))
        name, texts = node.named(asked.get("model")), asked.get("texts", ())
        refusal = await node.refusal(name, may_wait=headers.get("X-NPU-Restart-Wait-Ms") != "0")
        if texts and name in node.models and refusal is None:
            await node.work(name, node.pace * (1 + len(texts) / 64))
        node.script(refusal)
        step, answer = await super()._take(url, path, headers, json.dumps(asked | {"model": name}).encode())
        self.misrouted += answer.status == 404 or (step is not None and step.code == "model_loading")
        return step, answer
