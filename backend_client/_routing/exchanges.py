"""Requests in OpenAI's dialect on the nodes of a runtime: routed, retried and followed like every other call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from backend_client._fleet.lease import Lease
from backend_client._fleet.node import Requirement
from backend_client._protocol import forms, wire
from backend_client._protocol.answers import NotAnAnswer, read_answer, read_json
from backend_client._protocol.dialect import StreamEvent, StreamForm, failure_in, read_event, usage_of
from backend_client._protocol.jobs import EventStream, Exchange
from backend_client._protocol.wire import Reply, WireCall
from backend_client._protocol.wire_errors import event_error, status_error
from backend_client._resilience.deadline import Deadline
from backend_client._resilience.threads import in_daemon_thread
from backend_client._routing.affinity import StoredResponses
from backend_client._routing.dispatcher import Call
from backend_client._routing.runtime import Running, Runtime
from backend_client._routing.streaming import Opened, Reading, follow, open_stream, read_whole
from backend_client.errors import BadReply, RequestRejected
from backend_client.options import ClientOptions
from backend_client.results import RawReply, Usage

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
        encode = _encoder(job, form)

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
        encode = _encoder(job, form)

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
            body = wire.read_from(node, read_json, reply.body)
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
            event = wire.read_from(node, read_event, item)
            failure = failure_in(event)
            if failure is not None:
                raise event_error(node, failure, wired.model)
            event = wire.read_from(node, read, event)
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
    route = wire.route_info(head.headers)
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


def _encoder(job: Exchange, form: StreamForm | None) -> Callable[[Call], WireCall]:
    """Encodes the request on its first attempt, when the model is known, and keeps it for the others."""
    encoded: WireCall | None = None

    def encode(call: Call) -> WireCall:
        nonlocal encoded
        if encoded is None:
            content, content_type = b"", "application/json"
            if job.body is not None:
                body = form.request(job.body) if form else dict(job.body)
                body |= {"model": call.need.model} if call.need.model else {}
                content = wire.encode(body) if job.file is None else b""
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
