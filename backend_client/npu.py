"""The fleet as a backend: jobs become requests to nodes, replies become results."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend_client import wire
from backend_client.discovery import Follower, Source
from backend_client.dispatch import Call, Dispatcher
from backend_client.errors import ConfigurationError, NPUError, StreamInterrupted
from backend_client.fleet.bindings import Bindings
from backend_client.fleet.health import Prober
from backend_client.fleet.node import Requirement
from backend_client.fleet.pool import Lease, Pool
from backend_client.fleet.report import ModelKind
from backend_client.jobs import Answer, EmbedJob, GenerateJob, Job
from backend_client.options import ClientOptions
from backend_client.resilience.budget import RetryBudget
from backend_client.resilience.deadline import Deadline
from backend_client.resilience.hedging import Latencies, hedged
from backend_client.resilience.retry import Retrier
from backend_client.results import EmbedBatch, GenerateResult, Usage
from backend_client.transport import Transport
from backend_client.wire import Done, EmbedReply, RouteInfo, WireCall


@dataclass(slots=True)
class _Opened:
    """A stream whose first piece has come."""

    items: AsyncGenerator[str | Done, None]
    first: str | Done


class FleetBackend:
    """Embeds and generates on the pool's nodes. Probes and connections begin with the first call."""

    def __init__(
        self,
        pool: Pool,
        bindings: Bindings,
        make_transport: Callable[[], Transport],
        options: ClientOptions,
        rng: random.Random,
        sources: Sequence[Source] = (),
    ) -> None:
        self._pool = pool
        self.bindings = bindings
        self._make_transport = make_transport
        self._options = options
        self._rng = rng
        self._budget = RetryBudget(options.retry, pool.clock)
        # By the size of the request, in powers of two: a batch is not slow for taking longer than a single text.
        self._latencies = defaultdict[int, Latencies](lambda: Latencies(options.hedge))
        self._sources = sources
        self._follower: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to probe. Raises ConfigurationError after `close`, or in another event loop than before."""
        loop = asyncio.get_running_loop()
        if self._loop is loop and not self._closed:
            return
        if self._closed:
            raise ConfigurationError("this client is closed; make a new one")
        if self._loop is not None:
            raise ConfigurationError(
                "this client belongs to another event loop; make one per loop, or use backend_client.sync"
            )
        self._loop = loop
        self._transport = self._make_transport()
        self._prober = Prober(self._pool, self._transport.health, self._options.probe, self._rng)
        self._dispatcher = Dispatcher(
            self._pool, self.bindings, self._prober, Retrier(self._options.retry, self._budget, self._rng)
        )
        for node in self._pool.nodes.values():
            self._prober.watch(node)
        if self._sources:
            self._pool.complete = False
            self._follower = asyncio.create_task(self._follow(), name="node discovery")

    @property
    def retries_left(self) -> float:
        """What the retry budget holds."""
        return self._budget.balance

    def add(self, urls: Iterable[str]) -> None:
        """Take nodes in; they get requests once a probe has passed."""
        for node in self._pool.add(urls):
            if self._loop is not None:
                self._prober.watch(node)

    def remove(self, urls: Iterable[str]) -> None:
        """Let nodes go; what is under way there ends as it will."""
        for url in urls:
            self._pool.remove(url)
            if self._loop is not None:
                self._prober.forget(url)

    async def _follow(self) -> None:
        follower = Follower(
            self._sources,
            self._pool.nodes,
            add=self.add,
            remove=self.remove,
            interval=self._options.discovery_interval,
        )
        await follower.look()
        self._pool.complete = True
        self._prober.tell()
        await follower.follow()

    async def known(self) -> None:
        """Wait until every node's first probe has ended."""
        self.start()
        while self._pool.unknown:
            await self._prober.news()

    async def close(self) -> None:
        """End the probes and close the connections."""
        if self._loop is not None and not self._closed:
            self._closed = True
            if self._follower is not None:
                self._follower.cancel()
                await asyncio.gather(self._follower, return_exceptions=True)
            await self._prober.close()
            await self._transport.close()
        self._closed = True

    def concurrency(self) -> int:
        """A few batches for every node."""
        return max(1, len(self._pool.nodes)) * self._options.batch.per_node

    async def embed(self, job: EmbedJob) -> EmbedBatch:
        """One POST /embeddings, on one node after another until one serves it; on two at once when hedging says so."""
        self.start()
        first = self._call("embedding", job, self._options.timeouts.attempt)
        after = self._latencies[len(job.texts).bit_length()].percentile()
        if after is None:
            return await self._embed(first, job)
        second = self._call("embedding", job, self._options.timeouts.attempt)
        # The second goes elsewhere: it begins with the nodes that the first has asked.
        second.tries.nodes = first.tries.nodes
        return await hedged(
            lambda: self._embed(first, job),
            lambda: self._embed(second, job),
            after=after,
            may=lambda: self._dispatcher.elsewhere(first) and self._budget.withdraw(),
        )

    async def _embed(self, call: Call, job: EmbedJob) -> EmbedBatch:
        body: dict[str, Any] = {"texts": list(job.texts)}
        if job.truncate:
            body["truncate"] = True
        encode = _encoder(job, body, job.texts)

        async def send(lease: Lease) -> EmbedReply:
            reply = await self._transport.embed(lease.node.url, encode(call))
            model = reply.route.model or lease.model
            self._learn(lease, model)
            self.bindings.check(lease.node.url, model, reply.space)
            return reply

        served = await self._dispatcher.run(call, send)
        self._dispatcher.settle(call, served.lease, None)
        if self._options.hedge.percentile is not None:
            self._latencies[len(job.texts).bit_length()].add(call.attempts[-1].duration)
        reply = served.value
        return EmbedBatch(
            vectors=reply.vectors,
            space=reply.space,
            usage=Usage(reply.route.prompt_tokens),
            **_origin(call, served.lease, reply.route),
        )

    async def generate(self, job: GenerateJob) -> GenerateResult:
        """One POST /inference, on one node after another until one serves it."""
        self.start()
        call = self._call("generation", job, None)
        encode = _encoder(job, {"prompt": job.prompt, **job.sampling}, [job.prompt])

        async def send(lease: Lease) -> tuple[str, Done]:
            text, done = await self._transport.generate(lease.node.url, encode(call))
            self._learn(lease, done.model)
            return text, done

        served = await self._dispatcher.run(call, send)
        self._dispatcher.settle(call, served.lease, None)
        text, done = served.value
        return _generated(call, served.lease, done, text)

    async def open_stream(self, job: GenerateJob, opened_by: Deadline | None = None) -> Answer:
        """Open a stream on one node after another; once a piece has come, that node's answer is the answer."""
        self.start()
        call = self._call("generation", job, None)
        call.deadline = opened_by or job.deadline
        encode = _encoder(job, {"prompt": job.prompt, **job.sampling, "stream": True}, [job.prompt])

        async def send(lease: Lease) -> _Opened:
            items = self._transport.stream(lease.node.url, encode(call))
            return _Opened(items, await anext(items))

        served = await self._dispatcher.run(call, send)
        call.deadline = job.deadline
        return self._answer(call, served.lease, served.value)

    async def _answer(self, call: Call, lease: Lease, opened: _Opened) -> Answer:
        parts: list[str] = []
        item = opened.first
        # What holds when the caller leaves in the middle: it says nothing of the node.
        ended: BaseException | None = asyncio.CancelledError()
        try:
            while not isinstance(item, Done):
                parts.append(item)
                yield item
                item = await self._dispatcher.guard(call, lease, anext(opened.items))
            self._learn(lease, item.model)
            ended = None
        except NPUError as error:
            ended = error
        finally:
            self._dispatcher.settle(call, lease, ended)
            await opened.items.aclose()
        if isinstance(item, Done):
            yield _generated(call, lease, item, "".join(parts))
        elif isinstance(ended, NPUError):
            raise StreamInterrupted(
                f"the answer stopped after {sum(map(len, parts))} characters: {ended.message}",
                partial_text="".join(parts),
                attempts=call.attempts,
                request_id=call.request_id,
            )

    def _call(self, kind: ModelKind, job: Job, attempt_timeout: float | None) -> Call:
        need = Requirement(kind, job.model, job.require_device)
        return Call(need, job.deadline, job.request_id, attempt_timeout, self._pool.clock())

    def _learn(self, lease: Lease, model: str) -> None:
        asked = lease.need.model
        if asked is not None and asked != model:
            lease.node.learn(asked, model)


def _origin(call: Call, lease: Lease, route: RouteInfo) -> dict[str, Any]:
    return {
        "source": "npu",
        "node": lease.node.url,
        "model": route.model or lease.model,
        "device": route.device,
        "request_id": call.request_id,
        "attempts": tuple(call.attempts),
        "route_reason": route.reason,
        "npu_busy_delta_us": route.busy_delta_us,
        "emulated": route.emulated,
    }


def _generated(call: Call, lease: Lease, done: Done, text: str) -> GenerateResult:
    return GenerateResult(
        text=text,
        finish_reason=done.finish_reason,
        usage=done.usage,
        timing=done.timing,
        **_origin(call, lease, done.route),
    )


def _encoder(job: Job, body: Mapping[str, Any], texts: Any) -> Callable[[Call], WireCall]:
    """Encodes the request on its first attempt, when the model is known, and keeps it for the others."""
    encoded: WireCall | None = None

    def encode(call: Call) -> WireCall:
        nonlocal encoded
        if encoded is None:
            model = call.need.model
            encoded = WireCall(
                wire.encode({**body, "model": model} if model else body),
                texts,
                job.deadline,
                job.request_id,
                model,
                job.priority,
                job.require_device,
            )
        return encoded

    return encode
