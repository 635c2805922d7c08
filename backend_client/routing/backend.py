"""The fleet as a backend: jobs become requests to nodes, and their replies results.

`FleetBackend` builds the requests and reads the replies, `Dispatcher` (call.py) decides about attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from backend_client.errors import (
    BadReply,
    ConnectionLost,
    NPUError,
    RequestRejected,
    StreamInterrupted,
)
from backend_client.fleet.node import Lease, Requirement
from backend_client.http import forms, messages
from backend_client.http.errors import event_error, status_error
from backend_client.http.forwarding import Forwarded, StreamWatch, asking_for_usage, asks_for_stream, in_our_words
from backend_client.http.health import ModelReport
from backend_client.http.messages import EmbedJob, Exchange, Reply, Vectors, WireCall, binary_vectors, costs, plain_name
from backend_client.http.routes import ROUTES, dimensions_asked, read_whole, runs_on_device
from backend_client.http.stream_forms import (
    INFERENCE,
    EventStream,
    StreamEvent,
    WholeForm,
    failure_in,
    read_event,
    usage_of,
)
from backend_client.lifetime import STARTED, Deadline, OpenCalls, in_daemon_thread, owning
from backend_client.options import ClientOptions
from backend_client.results import Attempt, EmbedBatch, Origin, RawReply, Usage
from backend_client.routing.call import Call
from backend_client.routing.runtime import Running, Runtime

_LARGE_FILE = 1024 * 1024


class FleetBackend:
    """Serves jobs on the nodes of a runtime. Every error has the call's attempts; see `Dispatcher.run`."""

    def __init__(self, runtime: Runtime, options: ClientOptions) -> None:
        self.runtime = runtime
        self._options = options
        self._silence = options.timeouts.silence

    @property
    def calls(self) -> OpenCalls:
        return self.runtime.calls

    async def close(self) -> None:
        await self.calls.close()

    def concurrency(self) -> int:
        """A few batches for every node."""
        return max(1, len(self.runtime.pool.nodes)) * self._options.batch.per_node

    async def models(self) -> list[ModelReport]:
        """The models of all nodes that can be reached."""
        await self.runtime.known()
        return [model for node in self.runtime.pool.nodes.values() for model in node.models.values()]

    async def embed(self, job: EmbedJob) -> EmbedBatch:
        """One POST /embeddings, on one node after another until one serves it."""
        running = self.runtime.start()
        need = Requirement("embedding", job.model, job.require_device)
        call = running.dispatcher.begin(job, need, self._options.timeouts.attempt)

        async def send(lease: Lease) -> tuple[Vectors, Reply]:
            wired = call.wired
            if wired is None:
                model = call.need.model
                encoded = messages.encode_texts(
                    job.texts, model, truncate=job.truncate, input_type=job.input_type, dimensions=job.dimensions
                )
                wired = call.wired = job.wired(
                    encoded, model, call.need.device, "/embeddings", "application/octet-stream"
                )
            wired.may_wait = call.may_wait
            node = lease.node.url
            reply = await running.transport.exchange(node, wired)
            if reply.status != 200:
                raise status_error(node, reply, wired.model)
            vectors = messages.read_from(node, binary_vectors, reply, len(job.texts))
            _check(lease, reply.headers, device=True)
            self._check_space(lease, reply, vectors, job.dimensions)
            return vectors, reply

        (vectors, reply), lease = await running.dispatcher.run(call, send)
        tokens, busy = costs(reply.headers)
        return EmbedBatch(
            vectors=vectors,
            space=reply.headers["x-space"],
            usage=Usage(tokens),
            **_origin(call, lease, reply.headers, busy, {}),
        )

    async def exchange(self, job: Exchange) -> RawReply:
        """The whole reply to a request, on one node after another until one serves it.

        Where the route can stream, it is streamed between node and client, so that a hung engine is distinguished from
        a long answer. Nothing has reached the caller before the end, so a failure in the middle is retried like any
        other.
        """
        running = self.runtime.start()
        form = ROUTES[job.path].form_of(job)
        limit = None if form or job.kind == "transcription" else self._options.timeouts.attempt
        call = running.dispatcher.begin(job, _need(job), limit)

        async def send(lease: Lease) -> tuple[Reply, Any]:
            wired = await _encoded(job, call, form)
            if form is None:
                return await self._send(running, lease, wired, job)
            opened = await self._open(running, lease, wired, job, form)
            body = form.whole(await self._read_whole(lease, opened, form))
            messages.read_from(lease.node.url, ROUTES[job.path].check, job.body or {}, body)
            return opened.head, body

        (head, body), lease = await running.dispatcher.run(call, send)
        return _raw_reply(call, lease, head, body, body)

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """Open a stream on one node after another; once the answer has begun, that node's answer is the answer."""
        running = self.runtime.start()
        form = ROUTES[job.path].form_of(job)
        if form is None:
            raise RequestRejected(f"{job.path} cannot be streamed", status=400, code="invalid_request", param="stream")
        call = running.dispatcher.begin(job, _need(job), streamed=True)
        call.deadline = opened_by or job.deadline

        async def send(lease: Lease) -> _Opened:
            return await self._open(running, lease, await _encoded(job, call, form), job, form)

        opened, lease = await running.dispatcher.run(call, send, settle=False)
        call.deadline = job.end_of_stream()
        return self._follow(running, call, lease, opened, form)

    async def _send(self, running: Running, lease: Lease, wired: WireCall, job: Exchange) -> tuple[Reply, Any]:
        node = lease.node.url
        reply = await running.transport.exchange(node, wired)
        if reply.status != 200:
            job.refused.append(reply)
            raise status_error(node, reply, wired.model)
        body, found = messages.read_from(node, read_whole, job, reply)
        self._check_whole(lease, job, reply, body, found)
        return reply, body

    def _check_whole(self, lease: Lease, job: Exchange, reply: Reply, body: Any, found: Any) -> None:
        """Check the model, the device and the vector space of a reply that came whole. Raises BadReply."""
        _check(lease, reply.headers, body, device=runs_on_device(job))
        if job.kind == "embedding":
            self._check_space(lease, reply, found, dimensions_asked(job))

    async def _open(self, running: Running, lease: Lease, wired: WireCall, job: Exchange, form: WholeForm) -> _Opened:
        """Return once the answer has begun. Raises what the stream raises."""
        items = _read(lease, job, running.transport.events(lease.node.url, wired), wired, form)
        head = Reply(200, {})
        held: list[StreamEvent] = []
        try:
            async for item in items:
                if isinstance(item, Reply):
                    head = item
                    continue
                held.append(item)
                if form.begins(item) or form.ends(item):
                    self.runtime.pool.heard(lease)
                    return _Opened(head, held, items)
        except BaseException:
            await items.aclose()
            raise
        raise ConnectionLost("the stream ended before the answer began", node=lease.node.url)

    async def _read_whole(self, lease: Lease, opened: _Opened, form: WholeForm) -> list[StreamEvent]:
        """All events up to the last one. Raises what the stream raises."""
        events = opened.held
        try:
            while not form.ends(events[-1]):
                events.append(await opened.following(lease))
                self.runtime.pool.heard(lease)
        finally:
            await opened.rest.aclose()
        return events

    @owning
    async def _follow(
        self, running: Running, call: Call, lease: Lease, opened: _Opened, form: WholeForm
    ) -> EventStream:
        """Yield all events up to the last one, settle the lease, and yield who answered.

        Raises StreamInterrupted, with the text so far, when the stream fails; it is neither retried nor taken over.
        """
        dispatcher = running.dispatcher
        parts: list[str] = []
        said: dict[str, Any] = {}
        held = iter(opened.held)
        # What holds when the caller leaves in the middle: it says nothing of the node.
        ended: BaseException | None = asyncio.CancelledError()
        try:
            yield STARTED
            while True:
                event = next(held, None)
                if event is None:
                    async with self.runtime.calls.open():
                        event = await dispatcher.guard(call, lease, partial(opened.following, lease), self._silence)
                    self.runtime.pool.heard(lease)
                data = event.data or {}
                for part in (data, data.get("response")):
                    if isinstance(part, dict) and isinstance(part.get("usage"), dict):
                        said = part
                if "npu_busy_delta_us" in data:
                    said = said | {"npu_busy_delta_us": data["npu_busy_delta_us"]}
                if form.ends(event):
                    break
                parts.append(event.text)
                yield event
            ended = None
        except NPUError as error:
            ended = error
        finally:
            dispatcher.settle(call, lease, ended)
            await opened.rest.aclose()
        if isinstance(ended, NPUError):
            raise StreamInterrupted.after(parts, ended, attempts=call.attempts, request_id=call.request_id)
        if event is not None:
            yield event
        yield _raw_reply(call, lease, opened.head, said, None)

    async def forward(self, job: Exchange, opened_by: Deadline | None = None) -> tuple[Forwarded, tuple[Attempt, ...]]:
        """The reply of a node to `job.content`, its bytes unchanged: whole, or as they come once the answer has begun.

        No attempt came before those of the reply. Raises as `exchange` and `open_exchange`.
        """
        running = self.runtime.start()
        limit = self._options.timeouts.attempt if job.kind in {"embedding", "rerank"} else None
        call = running.dispatcher.begin(job, _need(job), limit, streamed=asks_for_stream(job))
        call.deadline = opened_by or job.deadline

        async def send(lease: Lease) -> tuple[Reply, bytes, StreamWatch, AsyncGenerator[Reply | bytes, None]]:
            wired = await _encoded(job, call, None)
            # A model may load in silence for as long as it takes.
            streamed = call.streamed and runs_on_device(job)
            parts = running.transport.parts(lease.node.url, wired, streamed=streamed)
            try:
                return await self._begin(lease, job, wired, parts)
            except BaseException:
                await parts.aclose()
                raise

        (head, begun, watch, parts), lease = await running.dispatcher.run(call, send, settle=False)
        call.deadline = job.end_of_stream()
        if watch.ended:
            running.dispatcher.settle(call, lease, None)
            await parts.aclose()
        content = begun if watch.ended else self._pass_on(running, call, lease, watch, begun, parts)
        origin = Origin(**_origin(call, lease, head.headers, costs(head.headers)[1], {}))
        return Forwarded(head, origin, call.attempts, watch, content), ()

    async def _begin(
        self, lease: Lease, job: Exchange, wired: WireCall, parts: AsyncGenerator[Reply | bytes, None]
    ) -> tuple[Reply, bytes, StreamWatch, AsyncGenerator[Reply | bytes, None]]:
        """The head of the reply, and all of it or what came until the answer began."""
        node = lease.node.url
        watch = StreamWatch(job)
        begun = b""
        head: Reply | None = None
        async for part in parts:
            if isinstance(part, bytes):
                begun += messages.read_from(node, watch.feed, part)
                if watch.failure is not None:
                    raise event_error(node, watch.failure, wired.model)
                _check(lease, None, *watch.parts)
                if head is not None and watch.begun:
                    self.runtime.pool.heard(lease)
                    return head, begun, watch, parts
                continue
            head = part
            if head.status != 200:
                job.refused.append(head)
                raise status_error(node, in_our_words(head, job.path), wired.model)
            if not messages.read_from(node, watch.streamed, head):
                found = messages.read_from(node, watch.whole, head)
                self._check_whole(lease, job, head, watch.parts[0], found)
                return head, head.body, watch, parts
            _check(lease, head.headers, device=runs_on_device(job))
        raise ConnectionLost("the stream ended before the answer began", node=node)

    @owning
    async def _pass_on(
        self,
        running: Running,
        call: Call,
        lease: Lease,
        watch: StreamWatch,
        begun: bytes,
        parts: AsyncGenerator[Reply | bytes, None],
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream up to its end. Raises StreamInterrupted when it fails; it is not retried."""
        node = lease.node.url
        received = 0
        ended: BaseException | None = asyncio.CancelledError()
        try:
            yield STARTED
            yield begun
            received = len(watch.texts)
            clock = asyncio.get_running_loop().time
            silence = Deadline.after(self._silence, clock)
            while not watch.ended:
                async with self.runtime.calls.open():
                    part = await running.dispatcher.guard(call, lease, lambda: anext(parts, None), silence.remaining())
                if not isinstance(part, bytes):
                    watch.close()
                    if watch.ended:
                        break
                    raise ConnectionLost("the stream ended before the answer did", node=node)
                complete = messages.read_from(node, watch.feed, part)
                _check(lease, None, *watch.parts)
                if watch.parts:
                    # A comment says that the connection lives, and nothing of the engine.
                    self.runtime.pool.heard(lease)
                    silence = Deadline.after(self._silence, clock)
                if complete:
                    yield complete
                    received = len(watch.texts)
                if watch.failure is not None:
                    # The caller has it, in the node's own words.
                    raise event_error(node, watch.failure, call.need.model)
            ended = None
        except NPUError as error:
            ended = error
        finally:
            running.dispatcher.settle(call, lease, ended)
            await parts.aclose()
        if isinstance(ended, NPUError) and watch.failure is None:
            sent = watch.texts[:received]
            raise StreamInterrupted.after(sent, ended, attempts=call.attempts, request_id=call.request_id)

    async def ask_all(self, method: str, path: str, content: bytes, deadline: Deadline) -> list[tuple[str, Reply]]:
        """What each node that can be reached replies with 200 to a request that costs it little."""
        await self.runtime.known()
        transport = self.runtime.start().transport

        async def ask(node: str) -> tuple[str, Reply] | None:
            call = WireCall(content, deadline, messages.new_request_id(), method=method, path=path)
            try:
                async with self.runtime.calls.open(), asyncio.timeout(deadline.remaining()):
                    reply = await transport.exchange(node, call)
            except (NPUError, TimeoutError):
                return None
            return (node, reply) if reply.status == 200 else None

        nodes = [node.url for node in self.runtime.pool.nodes.values() if node.report and not node.probe_failures]
        return [found for found in await asyncio.gather(*map(ask, nodes)) if found is not None]

    async def find_in_stores(self, model: str, deadline: Deadline) -> bool:
        """Whether a node has a model in its store that none lists on /health; it lists and serves it from then on."""
        pool, prober = self.runtime.pool, self.runtime.start().prober
        if any(node.resolve(model) is not None for node in pool.nodes.values()):
            return False
        found = await self.ask_all("POST", "/api/show", messages.encode({"model": model}), deadline)
        await asyncio.gather(*(prober.probe(pool.nodes[url]) for url, _ in found if url in pool.nodes))
        return any(node.resolve(model) is not None for node in pool.nodes.values())

    def _check_space(self, lease: Lease, reply: Reply, vectors: Vectors, asked: int | None) -> None:
        """Raises SpaceChanged for vectors of another space than the one that was requested, or is bound."""
        space = reply.headers.get("x-space")
        model = reply.headers.get("x-model") or lease.model
        if not space:
            raise BadReply("the reply lacks X-Space: these are not a node's vectors", node=lease.node.url)
        # A request without texts gets no vectors.
        if len(vectors):
            self.runtime.bindings.check(lease, model=model, space=space, dimensions=vectors.shape[1], asked=asked)


@dataclass(slots=True)
class _Opened:
    """A stream whose answer has begun: the head of its reply, its events so far, and the rest of them."""

    head: Reply
    held: list[StreamEvent]
    rest: AsyncGenerator[Reply | StreamEvent, None]

    async def following(self, lease: Lease) -> StreamEvent:
        """The next event. Raises what the stream raises, ConnectionLost at its end."""
        try:
            event = await anext(self.rest)
        except StopAsyncIteration:
            event = None
        if not isinstance(event, StreamEvent):
            raise ConnectionLost("the stream ended before the answer did", node=lease.node.url)
        return event


@owning
async def _read(
    lease: Lease, job: Exchange, items: AsyncGenerator[Any, None], wired: WireCall, form: WholeForm
) -> AsyncGenerator[Reply | StreamEvent, None]:
    """The head and the events of a stream. Raises what an event says that reports a failure, BadReply for what is no
    event.
    """
    node, read = lease.node.url, form.reader(job.body or {})
    try:
        yield STARTED
        async for item in items:
            if isinstance(item, Reply):
                if item.status != 200:
                    job.refused.append(item)
                    raise status_error(node, item, wired.model)
                _check(lease, item.headers, device=runs_on_device(job))
                yield item
                continue
            if form is INFERENCE and item.name not in INFERENCE.NAMES:
                continue
            event = messages.read_from(node, read_event, item)
            failure = failure_in(event)
            if failure is not None:
                raise event_error(node, failure, wired.model)
            checked = messages.read_from(node, read, event)
            _check(lease, None, checked.data, (checked.data or {}).get("response"))
            yield checked
        if (end := form.closed(read)) is not None:
            yield end
    finally:
        await items.aclose()


def _check_device(lease: Lease, device: object) -> None:
    """Raise BadReply for the head, or the end, of an answer that does not name the required device."""
    required = lease.need.device
    if required not in {None, device}:
        what = "does not name its device" if device is None else "names another device"
        raise BadReply(f"{required} was required, and the answer {what}", node=lease.node.url, contradicts=True)


def _check_model(lease: Lease, answered: object) -> None:
    """Raise BadReply for the answer of another model than the one that was asked, by its id or a listed alias.

    None: the answer does not name its model.
    """
    node, asked = lease.node, lease.need.model
    if answered is None or asked is None:
        return
    name = answered if isinstance(answered, str) else ""
    if plain_name(name) in {plain_name(asked), plain_name(lease.model)}:
        return
    found = node.resolve(name)
    # If the node was reconfigured during the call, its next report may already name the model that answered.
    if found is None or found is not node.resolve(asked):
        # A name that the node does not list may be any text.
        what = found.id if found else "a model that its /health does not list"
        raise BadReply(f"was asked for {asked} and answered as {what}", node=node.url, contradicts=True)


def _check(lease: Lease, head: Mapping[str, str] | None, *bodies: Any, device: bool = False) -> None:
    """Check the model and the device that the head of a reply and its parts name; with `device`, the head must name it.

    Raises BadReply.
    """
    if head is not None:
        _check_model(lease, head.get("x-model"))
        if device:
            _check_device(lease, head.get("x-npu-node-device"))
    for body in bodies:
        if isinstance(body, dict):
            _check_model(lease, body.get("model"))
            if "device" in body:
                _check_device(lease, body["device"])


def _raw_reply(call: Call, lease: Lease, head: Reply, said: Any, body: Any) -> RawReply:
    """The reply with this `body`; `said` is what its body or its last events say of its costs."""
    said = said if isinstance(said, dict) else {}
    prompt, completion = usage_of(said)
    tokens, busy = messages.costs(head.headers)
    # Of a recording nodes count positions of audio, and only those of its first part.
    counted = 0 if lease.need.kind == "transcription" else tokens
    usage = Usage(prompt or counted, completion)
    return RawReply(status=head.status, body=body, usage=usage, **_origin(call, lease, head.headers, busy, said))


def _origin(
    call: Call, lease: Lease, head: Mapping[str, str], busy: int | None, said: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of `Origin`, for every result of a node."""
    # A stream's device and busy time are known only at its end, so the body goes before the headers.
    later, device, emulated = (said.get(name) for name in ("npu_busy_delta_us", "device", "emulated"))
    return {
        "source": "node",
        "node": lease.node.url,
        "model": head.get("x-model") or lease.model,
        "device": device if isinstance(device, str) else head.get("x-npu-node-device"),
        "request_id": call.request_id,
        "attempts": tuple(call.attempts),
        "route_reason": head.get("x-npu-node-route-reason"),
        "npu_busy_delta_us": later if type(later) is int else busy,
        "emulated": emulated if isinstance(emulated, bool) else head.get("x-npu-emulated") == "true",
        "headers": head,
    }


def _need(job: Exchange) -> Requirement:
    return Requirement(job.kind, job.model, job.require_device if runs_on_device(job) else None)


async def _encoded(job: Exchange, call: Call, form: WholeForm | None) -> WireCall:
    """The request, encoded on its first attempt, when the model is known, and kept for the others."""
    if call.wired is None:
        large = job.file is not None and len(job.file[1]) > _LARGE_FILE
        # Copying a long recording takes longer than the event loop may be held up.
        call.wired = (
            await in_daemon_thread(lambda: _encode(job, call, form), "encode a recording")
            if large
            else _encode(job, call, form)
        )
    call.wired.may_wait = call.may_wait
    return call.wired


def _encode(job: Exchange, call: Call, form: WholeForm | None) -> WireCall:
    content, content_type = job.content or b"", job.content_type
    if job.content is None and job.body is not None:
        body = form.request(job.body) if form else dict(job.body)
        body |= {"model": call.need.model} if call.need.model else {}
        if job.file is None:
            content = messages.encode(body)
        else:
            content, content_type = forms.encode_form(body, *job.file)
    if form is None:
        # Forwarded; with a form it was asked for already.
        content = asking_for_usage(job.path, job.body or {}, content)
    wired = job.wired(content, call.need.model, call.need.device, job.path, "text/event-stream" if form else "*/*")
    wired.content_type = content_type
    wired.streamed, wired.ends = call.streamed, job.ends
    return wired
