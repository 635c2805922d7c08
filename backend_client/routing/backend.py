"""The fleet behind a client: a method for each kind of call, which sends it through `call.Dispatcher`.

A streamed answer is held back until it has begun, then handed on as it comes, without a second attempt.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from backend_client.deadline import Deadline
from backend_client.errors import BadReply, ConnectionLost, NPUError, RequestRejected, StreamInterrupted
from backend_client.fleet.node import Lease, Requirement
from backend_client.fleet.pool import Pool
from backend_client.http import forms, messages
from backend_client.http.answers import NotAnAnswer, read_answer, read_json
from backend_client.http.errors import event_error, status_error
from backend_client.http.health import ModelReport
from backend_client.http.messages import (
    Answer,
    Done,
    EmbedJob,
    EmbedReply,
    EventStream,
    Exchange,
    GenerateJob,
    Job,
    Reply,
    RouteInfo,
    WireCall,
)
from backend_client.http.openai_stream import StreamEvent, StreamForm, failure_in, read_event, usage_of
from backend_client.lifetime import in_daemon_thread
from backend_client.options import ClientOptions
from backend_client.results import EmbedBatch, GenerateResult, RawReply, Usage
from backend_client.routing.call import Call, Dispatcher, Latencies, hedged
from backend_client.routing.responses import StoredResponses
from backend_client.routing.runtime import Running, Runtime

I = TypeVar("I")  # noqa: E741  (an item of a stream)


@dataclass(frozen=True, slots=True)
class Reading(Generic[I]):
    """How the items of a stream are read: which one begins and ends the answer, and the text that each adds."""

    begins: Callable[[I], bool]
    ends: Callable[[I], bool]
    text: Callable[[I], str]


@dataclass(slots=True)
class Opened(Generic[I]):
    """A stream that has begun; `held` are its items so far."""

    items: AsyncGenerator[I, None]
    held: list[I]


async def open_stream(pool: Pool, lease: Lease, items: AsyncGenerator[I, None], reading: Reading[I]) -> Opened[I]:
    """Return once the answer has begun. Raises what the stream raises."""
    held: list[I] = []
    try:
        async for item in items:
            held.append(item)
            if reading.begins(item) or reading.ends(item):
                pool.heard(lease)
                return Opened(items, held)
    except BaseException:
        await items.aclose()
        raise
    raise ConnectionLost("the stream ended before the answer began", node=lease.node.url)


async def read_whole(pool: Pool, lease: Lease, opened: Opened[I], reading: Reading[I]) -> list[I]:
    """All items up to the last one. Raises what the stream raises."""
    items = opened.held
    try:
        while not reading.ends(items[-1]):
            try:
                items.append(await anext(opened.items))
            except StopAsyncIteration:
                break
            pool.heard(lease)
        else:
            return items
    finally:
        await opened.items.aclose()
    raise ConnectionLost("the stream ended before the answer did", node=lease.node.url)


async def follow(
    pool: Pool, dispatcher: Dispatcher, call: Call, lease: Lease, opened: Opened[I], reading: Reading[I]
) -> AsyncGenerator[I, None]:
    """Yield all items up to the last one, and settle the lease.

    Raises StreamInterrupted, with the text so far, when the stream fails; it is neither retried nor taken over.
    """
    parts: list[str] = []
    item: I | None = None
    # What holds when the caller leaves in the middle: it says nothing of the node.
    ended: BaseException | None = asyncio.CancelledError()
    try:
        for item in opened.held[:-1]:
            parts.append(reading.text(item))
            yield item
        item = opened.held[-1]
        while not reading.ends(item):
            parts.append(reading.text(item))
            yield item
            with dispatcher.calls.open():
                item = await dispatcher.guard(call, lease, _following(opened, lease))
            pool.heard(lease)
        ended = None
    except NPUError as error:
        ended = error
    finally:
        dispatcher.settle(call, lease, ended)
        await opened.items.aclose()
    if ended is None and item is not None:
        yield item
    elif isinstance(ended, NPUError):
        raise StreamInterrupted.after(parts, ended, attempts=call.attempts, request_id=call.request_id)


async def _following(opened: Opened[I], lease: Lease) -> I:
    try:
        return await anext(opened.items)
    except StopAsyncIteration:
        pass
    raise ConnectionLost("the stream ended before the answer did", node=lease.node.url)


# Requests in OpenAI's dialect on the nodes of a runtime: routed, retried and followed like every other call.

_Item = Reply | StreamEvent
_LARGE_FILE = 1024 * 1024
# They run on no device.
_TOKENS = frozenset({"/tokenize", "/detokenize"})


class FleetExchanges:
    """Sends exchanges to nodes. Every error has the call's attempts; see `Dispatcher.run`."""

    def __init__(self, runtime: Runtime, options: ClientOptions) -> None:
        self._runtime = runtime
        self._options = options
        self._stored = StoredResponses(runtime)

    async def exchange(self, job: Exchange) -> RawReply:
        """The whole reply.

        Where the route can stream, it is streamed between node and client, so that a hung engine is distinguished from
        a long answer. Nothing has reached the caller before the end, so a failure in the middle is retried like any
        other.
        """
        job = await self._stored.placed(job, self._whole)
        reply = await self._whole(job)
        self._stored.learn(job, reply, reply.body)
        return reply

    async def _whole(self, job: Exchange) -> RawReply:
        running = self._runtime.start()
        form = job.form
        limit = None if form or job.kind == "transcription" else self._options.timeouts.attempt
        call = running.dispatcher.call(job, _need(job), _length(job), limit)
        encode = _exchanges_encoder(job, form)

        async def send(lease: Lease) -> tuple[Reply, Any]:
            wired = await _encoded(job, lambda: encode(call))
            if form is None:
                return await self._send(running, lease, wired, job)
            opened = await self._open(running, lease, wired, job, form)
            head, *events = await read_whole(self._runtime.pool, lease, opened, _reading(form))
            body = form.whole([event for event in events if isinstance(event, StreamEvent)])
            if not isinstance(head, Reply):
                raise BadReply("the reply has no head", node=lease.node.url)
            _read_answer(lease.node.url, job, body)
            return head, body

        served = await running.dispatcher.run(call, send)
        running.dispatcher.settle(call, served.lease, None)
        head, body = served.value
        return _raw_reply(call, served.lease, head, body)

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """Open a stream on one node after another; once the answer has begun, that node's answer is the answer."""
        running = self._runtime.start()
        form = job.form
        if form is None:
            raise RequestRejected(f"{job.path} cannot be streamed")
        job = await self._stored.placed(job, self._whole)
        call = running.dispatcher.call(job, _need(job), _length(job))
        call.deadline = opened_by or job.deadline
        encode = _exchanges_encoder(job, form)

        async def send(lease: Lease) -> Opened[_Item]:
            wired = await _encoded(job, lambda: encode(call))
            return await self._open(running, lease, wired, job, form)

        served = await running.dispatcher.run(call, send)
        call.deadline = job.deadline
        items = follow(self._runtime.pool, running.dispatcher, call, served.lease, served.value, _reading(form))
        return self._learning(job, _events(call, served.lease, items))

    async def _learning(self, job: Exchange, events: EventStream) -> EventStream:
        response: Any = None
        try:
            async for item in events:
                if isinstance(item, StreamEvent):
                    response = (item.data or {}).get("response") or response
                else:
                    self._stored.learn(job, item, response)
                yield item
        finally:
            await events.aclose()

    async def _send(self, running: Running, lease: Lease, wired: WireCall, job: Exchange) -> tuple[Reply, Any]:
        node = lease.node.url
        reply = await running.transport.exchange(node, wired)
        if reply.status != 200:
            job.refused.append(reply)
            raise status_error(node, reply.status, _Headers(reply), reply.body, wired.model, keyed=reply.keyed)
        body: Any = reply.body
        if "json" in reply.headers.get("content-type", ""):
            body = messages.read_from(node, read_json, reply.body)
        _check(lease, job, reply.headers, body)
        found = _read_answer(node, job, body)
        if job.kind == "embedding":
            self._check_space(lease, reply, found.shape[1], (job.body or {}).get("dimensions"))
        return reply, body

    async def _open(
        self, running: Running, lease: Lease, wired: WireCall, job: Exchange, form: StreamForm
    ) -> Opened[_Item]:
        wired.refused = None
        try:
            items = _read(lease, job, running.transport.events(lease.node.url, wired), wired, form)
            return await open_stream(self._runtime.pool, lease, items, _reading(form))
        finally:
            if wired.refused is not None:
                job.refused.append(wired.refused)

    def _check_space(self, lease: Lease, reply: Reply, dimensions: int, asked: int | None) -> None:
        """Raises SpaceChanged for vectors of another space than the one that was requested, or is bound."""
        space = reply.headers.get("x-space")
        model = reply.headers.get("x-model") or lease.model
        if not space:
            raise BadReply("the reply lacks X-Space: this is not a node's /v1/embeddings", node=lease.node.url)
        self._runtime.bindings.check(
            lease,
            model=model,
            space=space,
            dimensions=dimensions,
            asked=asked,
        )


class _Headers(dict[str, str]):
    """The headers of a reply, by names in any case."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.headers)

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key.lower(), default)


def _check(lease: Lease, job: Exchange, head: Mapping[str, str] | None, *bodies: Any) -> None:
    """See `Lease.check_answer`: the head of a reply, and the models that its parts name. Raises BadReply."""
    if job.method != "POST" or job.body is None:
        # What is stored names the model that made it.
        return
    if head is not None:
        lease.check_answer(head.get("x-model"), head.get("x-npu-node-device"))
    for body in bodies:
        if isinstance(body, dict):
            lease.check_model(body.get("model"))


def _read_answer(node: str, job: Exchange, body: Any) -> Any:
    """See `answers.read_answer`. Raises BadReply."""
    try:
        return read_answer(job.path, job.body or {}, body)
    except NotAnAnswer as error:
        problem = BadReply(f"the reply is not an answer of {job.path}: {error}", node=node)
    raise problem


def _need(job: Exchange) -> Requirement:
    device = None if job.path in _TOKENS else job.require_device
    return Requirement(job.kind, job.model, device, node=job.node)


def _length(job: Exchange) -> int:
    return len(job.file[1] if job.file else str(job.body or ""))


def _reading(form: StreamForm) -> Reading[_Item]:
    return Reading(
        begins=lambda item: isinstance(item, StreamEvent) and form.begins(item),
        ends=lambda item: isinstance(item, StreamEvent) and form.ends(item),
        text=lambda item: item.text if isinstance(item, StreamEvent) else "",
    )


async def _read(
    lease: Lease, job: Exchange, items: AsyncGenerator[Any, None], wired: WireCall, form: StreamForm
) -> AsyncGenerator[_Item, None]:
    """The events of a stream. Raises what an event says that reports a failure, BadReply for what is no event."""
    node, read = lease.node.url, form.reader(job.body or {})
    try:
        async for item in items:
            if isinstance(item, Reply):
                if item.body:
                    raise BadReply("the reply is not an event stream", node=node)
                _check(lease, job, item.headers)
                yield item
                continue
            event = messages.read_from(node, read_event, item)
            failure = failure_in(event)
            if failure is not None:
                raise event_error(node, failure, wired.model)
            event = messages.read_from(node, read, event)
            _check(lease, job, None, event.data, (event.data or {}).get("response"))
            yield event
    finally:
        await items.aclose()


async def _events(call: Call, lease: Lease, items: AsyncGenerator[_Item, None]) -> EventStream:
    head = Reply(200, {})
    usage: dict[str, Any] = {}
    last: StreamEvent | None = None
    try:
        async for item in items:
            if isinstance(item, Reply):
                head = item
                continue
            for part in (item.data or {}, (item.data or {}).get("response")):
                if isinstance(part, dict) and isinstance(part.get("usage"), dict):
                    usage = part
            if item.data is not None and "npu_busy_delta_us" in item.data:
                usage = usage | {"npu_busy_delta_us": item.data["npu_busy_delta_us"]}
            last = item
            yield item
    finally:
        await items.aclose()
    if last is not None:
        yield _raw_reply(call, lease, head, usage, keep_body=False)


def _raw_reply(call: Call, lease: Lease, head: Reply, body: Any, *, keep_body: bool = True) -> RawReply:
    route = messages.route_info(head.headers)
    told = body if isinstance(body, dict) else {}
    busy = told.get("npu_busy_delta_us")
    prompt, completion = usage_of(told)
    # Of a recording nodes count positions of audio, and only those of its first part.
    counted = 0 if lease.need.kind == "transcription" else route.prompt_tokens
    return RawReply(
        source="npu",
        node=lease.node.url,
        model=route.model or lease.model,
        device=route.device,
        request_id=call.request_id,
        attempts=tuple(call.attempts),
        route_reason=route.reason,
        # A stream's busy time is known only at its end, so the body goes before the headers.
        npu_busy_delta_us=busy if type(busy) is int else route.busy_delta_us,
        emulated=route.emulated,
        headers=head.headers,
        status=head.status,
        body=body if keep_body else None,
        usage=Usage(prompt or counted, completion),
    )


async def _encoded(job: Exchange, encode: Callable[[], WireCall]) -> WireCall:
    """Copying a long recording takes longer than the event loop may be held up."""
    if job.file is None or len(job.file[1]) <= _LARGE_FILE:
        return encode()
    return await in_daemon_thread(encode, "encode a recording")


def _exchanges_encoder(job: Exchange, form: StreamForm | None) -> Callable[[Call], WireCall]:
    """Encodes the request on its first attempt, when the model is known, and keeps it for the others."""
    encoded: WireCall | None = None

    def encode(call: Call) -> WireCall:
        nonlocal encoded
        if encoded is None:
            content, content_type = b"", "application/json"
            if job.body is not None:
                body = form.request(job.body) if form else dict(job.body)
                body |= {"model": call.need.model} if call.need.model else {}
                content = messages.encode(body) if job.file is None else b""
                if job.file is not None:
                    content, content_type = forms.encode_form(body, *job.file)
            encoded = WireCall(
                content,
                (),
                job.deadline,
                job.request_id,
                call.need.model,
                job.priority,
                call.need.device,
                job.node_headers,
                job.method,
                job.path,
                content_type,
            )
        encoded.may_wait = call.may_wait
        return encoded

    return encode


# The fleet as a backend: jobs become requests to nodes, replies become results.

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
                encoded = messages.encode_texts(
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
            encoded = _wired(job, messages.encode({**body, "model": model} if model else body), texts, model)
        encoded.may_wait = call.may_wait
        return encoded

    return encode


def _wired(job: Job, encoded: bytes, texts: Sequence[str], model: str | None) -> WireCall:
    return WireCall(
        encoded, texts, job.deadline, job.request_id, model, job.priority, job.require_device, job.node_headers
    )
