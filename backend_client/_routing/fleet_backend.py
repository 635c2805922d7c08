"""The fleet as a backend: jobs become requests to nodes, replies become results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from backend_client._fleet.lease import Lease
from backend_client._fleet.node import Requirement
from backend_client._protocol import wire
from backend_client._protocol.jobs import Answer, EmbedJob, EventStream, Exchange, GenerateJob, Job
from backend_client._protocol.report import ModelReport
from backend_client._protocol.wire import Done, EmbedReply, Reply, RouteInfo, WireCall
from backend_client._resilience.deadline import Deadline
from backend_client._resilience.hedging import Latencies, hedged
from backend_client._routing.dispatcher import Call
from backend_client._routing.exchanges import FleetExchanges
from backend_client._routing.runtime import Running, Runtime
from backend_client._routing.streaming import Opened, Reading, follow, open_stream, read_whole
from backend_client.errors import BadReply
from backend_client.options import ClientOptions
from backend_client.results import EmbedBatch, GenerateResult, RawReply, Usage

_READING: Reading[str | Done] = Reading(
    begins=lambda _: True,
    ends=lambda item: isinstance(item, Done),
    text=lambda item: item if isinstance(item, str) else "",
)


class FleetBackend:
    """Embeds and generates on the nodes of a runtime."""

    def __init__(self, runtime: Runtime, options: ClientOptions) -> None:
        self.runtime = runtime
        self._options = options
        self._exchanges = FleetExchanges(runtime, options)
        # By the size of the request, in powers of two: a batch is not slow for taking longer than a single text.
        self._latencies = defaultdict[int, Latencies](lambda: Latencies(options.hedge))

    async def close(self) -> None:
        """End the probes and close the connections."""
        await self.runtime.close()

    def concurrency(self) -> int:
        """A few batches for every node."""
        return max(1, len(self.runtime.pool.nodes)) * self._options.batch.per_node

    async def embed(self, job: EmbedJob) -> EmbedBatch:
        """One POST /embeddings, on one node after another until one serves it; on two at once when hedging says so."""
        running = self.runtime.start()
        length = sum(map(len, job.texts))
        need = Requirement("embedding", job.model, job.require_device)
        first = running.dispatcher.call(job, need, length, self._options.timeouts.attempt)
        after = None
        if self._options.hedge.percentile is not None:
            after = self._latencies[len(job.texts).bit_length()].percentile()
        if after is None:
            return await self._embed(running, first, job)
        second = running.dispatcher.call(job, need, length, self._options.timeouts.attempt)
        second.hedge = True
        # The second goes elsewhere: it begins with the nodes that the first has asked.
        second.tried = first.tried
        return await hedged(
            lambda: self._embed(running, first, job),
            lambda: self._embed(running, second, job),
            after=after,
            may=lambda: running.dispatcher.elsewhere(first) and self.runtime.budget.withdraw(),
        )

    async def _embed(self, running: Running, call: Call, job: EmbedJob) -> EmbedBatch:
        wired: WireCall | None = None

        async def send(lease: Lease) -> EmbedReply:
            nonlocal wired
            if wired is None:
                model = call.need.model
                encoded = wire.encode_texts(
                    job.texts, model, truncate=job.truncate, input_type=job.input_type, dimensions=job.dimensions
                )
                wired = _wired(job, encoded, job.texts, model)
            wired.may_wait = call.may_wait
            reply = await running.transport.embed(lease.node.url, wired)
            lease.check_answer(reply.route.model, reply.route.device)
            self.runtime.bindings.check(
                lease,
                model=reply.route.model or lease.model,
                space=reply.space,
                dimensions=reply.vectors.shape[1],
                asked=job.dimensions,
            )
            return reply

        served = await running.dispatcher.run(call, send)
        running.dispatcher.settle(call, served.lease, None)
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
        """One POST /inference, on one node after another until one serves it.

        Streamed, so that a hung engine is distinguished from a long answer. Nothing has reached the caller before the
        end, so a failure in the middle is retried like any other.
        """
        running = self.runtime.start()
        need = Requirement("generation", job.model, job.require_device)
        call = running.dispatcher.call(job, need, len(job.prompt))
        encode = _encoder(job, {"prompt": job.prompt, **job.sampling, "stream": True}, [job.prompt])

        async def send(lease: Lease) -> tuple[str, Done]:
            opened = await self._open(running, call, lease, encode)
            *parts, done = await read_whole(self.runtime.pool, lease, opened, _READING)
            if not isinstance(done, Done):
                raise BadReply("the stream has no end", node=lease.node.url)
            return "".join(map(_READING.text, parts)), done

        served = await running.dispatcher.run(call, send)
        running.dispatcher.settle(call, served.lease, None)
        text, done = served.value
        return _generated(call, served.lease, done, text)

    async def open_stream(self, job: GenerateJob, opened_by: Deadline | None = None) -> Answer:
        """Open a stream on one node after another; once a piece has come, that node's answer is the answer."""
        running = self.runtime.start()
        need = Requirement("generation", job.model, job.require_device)
        call = running.dispatcher.call(job, need, len(job.prompt))
        call.deadline = opened_by or job.deadline
        encode = _encoder(job, {"prompt": job.prompt, **job.sampling, "stream": True}, [job.prompt])

        async def send(lease: Lease) -> Opened[str | Done]:
            return await self._open(running, call, lease, encode)

        served = await running.dispatcher.run(call, send)
        call.deadline = job.deadline
        items = follow(self.runtime.pool, running.dispatcher, call, served.lease, served.value, _READING)
        return self._answer(call, served.lease, items)

    async def exchange(self, job: Exchange) -> RawReply:
        """One request in OpenAI's dialect, on one node after another until one serves it."""
        return await self._exchanges.exchange(job)

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """The same as a stream; once the answer has begun, that node's answer is the answer."""
        return await self._exchanges.open_exchange(job, opened_by)

    async def models(self) -> list[ModelReport]:
        """The models of all nodes that can be reached."""
        await self.runtime.known()
        return [model for node in self.runtime.pool.nodes.values() for model in node.models.values()]

    async def _open(
        self, running: Running, call: Call, lease: Lease, encode: Callable[[Call], WireCall]
    ) -> Opened[str | Done]:
        items = _checked(lease, running.transport.stream(lease.node.url, encode(call)))
        return await open_stream(self.runtime.pool, lease, items, _READING)

    async def _answer(self, call: Call, lease: Lease, items: AsyncGenerator[str | Done, None]) -> Answer:
        parts: list[str] = []
        try:
            async for item in items:
                if isinstance(item, str):
                    parts.append(item)
                    yield item
                else:
                    yield _generated(call, lease, item, "".join(parts))
        finally:
            await items.aclose()


async def _checked(lease: Lease, items: AsyncGenerator[Reply | str | Done, None]) -> AsyncGenerator[str | Done, None]:
    """The pieces and the end of an answer. Raises BadReply where its head or end names another model or device."""
    try:
        async for item in items:
            if isinstance(item, Reply):
                lease.check_answer(item.headers.get("x-model"), item.headers.get("x-npu-node-device"))
                continue
            if isinstance(item, Done):
                lease.check_answer(item.route.model, item.route.device)
            yield item
    finally:
        await items.aclose()


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
        "headers": route.headers,
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
            encoded = _wired(job, wire.encode({**body, "model": model} if model else body), texts, model)
        encoded.may_wait = call.may_wait
        return encoded

    return encode


def _wired(job: Job, encoded: bytes, texts: Sequence[str], model: str | None) -> WireCall:
    return WireCall(
        encoded, texts, job.deadline, job.request_id, model, job.priority, job.require_device, job.node_headers
    )
