"""The fleet as a backend: requests go to nodes, and their replies become results.

A reply comes as bytes, which a `ReplyReader` reads and checks: a whole result is a stream that was collected, and a
stream of events and the bytes for a gateway's caller are two views of one engine, `_follow`. `Dispatcher` (call.py)
decides about attempts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from backend_client.errors import (
    BadReply,
    ConnectionLost,
    DeadlineExceeded,
    NPUError,
    RequestRejected,
    StreamInterrupted,
)
from backend_client.fleet.node import Lease
from backend_client.fleet.runtime import Runtime
from backend_client.http import messages
from backend_client.http.errors import event_error, status_error
from backend_client.http.messages import (
    Costs,
    ModelReport,
    Reply,
    Request,
    costs,
    joules,
    plain_name,
    read_from,
    read_whole,
)
from backend_client.http.replies import (
    Forwarded,
    ReplyReader,
    asking_for_usage,
    asks_for_stream,
    passed_on,
)
from backend_client.http.routes import ROUTES, runs_on_device
from backend_client.http.stream_forms import EventStream, StreamForm, WholeForm, usage_of
from backend_client.lifetime import STARTED, Deadline, OpenCalls, in_daemon_thread, owning
from backend_client.options import LONGEST_S, ClientOptions
from backend_client.results import EmbedBatch, Origin, RawReply, Usage
from backend_client.routing.call import Call, Dispatcher

_EVENTS = "text/event-stream"
_LARGE_FILE = 1024 * 1024
Parts = AsyncGenerator[Reply | bytes, None]


class FleetBackend:
    """Serves requests on the nodes of a runtime. Every error has the call's attempts; see `Dispatcher.run`."""

    def __init__(self, runtime: Runtime, options: ClientOptions, rng: random.Random) -> None:
        self.runtime = runtime
        self.dispatcher = Dispatcher(runtime, options, rng)
        self._options = options

    @property
    def calls(self) -> OpenCalls:
        return self.runtime.calls

    async def close(self) -> None:
        await self.calls.close()

    def concurrency(self) -> int:
        return max(1, len(self.runtime.pool.nodes)) * self._options.batch.per_node

    async def models(self) -> list[ModelReport]:
        await self.runtime.wait_probed()
        return [model for node in self.runtime.pool.nodes.values() for model in node.models.values()]

    async def embed(self, request: Request) -> EmbedBatch:
        call, lease, (head, spent, _, vectors) = await self._serve(request)
        origin = _origin(call, lease, head.headers, spent, {})
        return EmbedBatch(vectors=vectors, space=head.headers["x-space"], usage=Usage(spent.tokens), **origin)

    async def send(self, request: Request) -> RawReply:
        """The whole reply to a request.

        Where the route can stream, it is streamed between node and client, so that a hung engine is distinguished from
        a long answer. Nothing has reached the caller before the end, so a failure in the middle is retried like any
        other.
        """
        call, lease, (head, spent, body, _) = await self._serve(request)
        return _raw_reply(call, lease, head, spent, body, body)

    async def _serve(self, request: Request) -> tuple[Call, Lease, tuple[Reply, Costs, Any, Any]]:
        """The head of a whole reply, what that says of its costs, its body, and what the route's check reads in it."""
        transport = self.runtime.transport or self.runtime.start()
        route = ROUTES[request.path]
        form = route.form_of(request) if route.form else None
        limit = None if form or request.kind == "transcription" else self._options.timeouts.attempt
        accept = _EVENTS if form else "*/*" if request.path != "/embeddings" else "application/octet-stream"
        call = self._begin(request, limit, accept, by_token=form is not None)

        async def attempt(lease: Lease, headers: dict[str, str]) -> tuple[Reply, Costs, Any, Any]:
            if form is None:
                content = await _encode(call, None, headers)
                reply = await transport.request(lease.node.url, "POST", request.path, content, headers)
                return self._read_whole(lease, reply)
            reader, _ = await self._open(call, form, lease, headers, to_end=True)
            body = form.whole(reader.events)
            found = read_from(lease.node.url, ROUTES[request.path].check, request.body, body)
            return reader.head, reader.costs, body, found

        reply, lease = await self.dispatcher.run(call, attempt)
        return call, lease, reply

    def _read_whole(self, lease: Lease, reply: Reply) -> tuple[Reply, Costs, Any, Any]:
        """Read and check a reply that came whole, be it a refusal."""
        node, request = lease.node.url, lease.request
        if reply.status != 200:
            raise status_error(node, reply, request.model)
        _check(lease, reply.headers)
        body, found = read_from(node, read_whole, ROUTES[request.path].check, request, reply)
        spent = costs(reply.headers)
        if isinstance(body, dict):
            _check(lease, None, body)
        if request.kind == "embedding":
            self.runtime.bindings.check(lease, reply, found)
        return reply, spent, body, found

    async def open(self, request: Request) -> EventStream:
        """Open a stream on one node after another; once the answer has begun, that node's answer is the answer."""
        form = ROUTES[request.path].form_of(request)
        if form is None:
            raise RequestRejected(
                f"{request.path} cannot be streamed", status=400, code="invalid_request", param="stream"
            )
        self.runtime.start()
        call = self._begin(request, None, _EVENTS, streamed=True, by_token=True)
        (reader, parts), lease = await self.dispatcher.run(call, partial(self._open, call, form), settle=False)
        return self._follow(call, lease, reader, parts, reader.take_events)

    async def forward(self, request: Request) -> Forwarded:
        """The reply of a node to `request.content`, its bytes unchanged: whole, or as they come once it has begun.

        With a `failover` to the next token a whole reply is read as a stream, since only that shows its tokens, and
        with `stream_recovery` a stream is read to its end first. Raises as `send` and `open`.
        """
        self.runtime.start()
        failover, streamed = request.failover, asks_for_stream(request)
        if (failover.first_token_s or failover.stall_s) and not streamed and ROUTES[request.path].form_of(request):
            return Forwarded.whole(await self.send(replace(request, content=None)))
        held = streamed and failover.stream_recovery is not None
        limit = self._options.timeouts.attempt if request.kind in {"embedding", "rerank"} else None
        call = self._begin(request, limit, "*/*", streamed=streamed and not held, by_token=streamed)
        send = partial(self._open, call, ROUTES[request.path].form, as_bytes=True, to_end=held)
        (reader, parts), lease = await self.dispatcher.run(call, send, settle=False)
        content: bytes | AsyncGenerator[bytes, None]
        if reader.ended:
            self.dispatcher.settle(call, lease, None)
            await parts.aclose()
            content = reader.content
        else:
            content = self._follow(call, lease, reader, parts, reader.take_content)
        head = reader.head.headers
        origin = Origin(**_origin(call, lease, head, reader.costs, {}))
        return Forwarded(passed_on(head), origin, call.attempts, reader.count, content)

    def _begin(
        self, request: Request, limit: float | None, accept: str, *, streamed: bool = False, by_token: bool = False
    ) -> Call:
        """The call of a request, of which `limit` bounds each attempt."""
        if request.require_device is not None and not runs_on_device(request):
            request = replace(request, require_device=None)
        return Call(request, limit, self.runtime.pool.clock(), accept, streamed, by_token)

    async def _open(
        self,
        call: Call,
        form: StreamForm | None,
        lease: Lease,
        headers: dict[str, str],
        *,
        as_bytes: bool = False,
        to_end: bool = False,
    ) -> tuple[ReplyReader, Parts]:
        """Send the request; returns the answer once it has begun, or `to_end`, and the rest of the reply.

        Raises what the reply means. Where events fail after the answer has begun, `reader.failed` says it: the
        beginning is the caller's.
        """
        node, request = lease.node.url, lease.request
        content = await _encode(call, form if isinstance(form, WholeForm) and not as_bytes else None, headers)
        reader = ReplyReader(request, form, partial(_check, lease), as_bytes=as_bytes)
        # Lines have no comments, and a model may load in silence for as long as it takes.
        lively = call.by_token and form is not None and not form.lines and runs_on_device(request)
        parts = self.runtime.start().parts(node, request.path, content, headers, lively=lively)
        try:
            while not reader.begun:
                part = await anext(parts, None)
                if isinstance(part, Reply):
                    if part.status != 200:
                        raise status_error(node, part, request.model, ROUTES[request.path].dialect)
                    found = read_from(node, reader.begin, part)
                    if reader.ended and request.kind == "embedding":
                        self.runtime.bindings.check(lease, part, found)
                    continue
                try:
                    self._read(lease, reader, part)
                except NPUError as error:
                    if as_bytes or to_end or not reader.begun:
                        raise
                    reader.failed = error
            while to_end and not reader.ended:
                self._read(lease, reader, await anext(parts, None))
        except BaseException:
            await parts.aclose()
            raise
        if to_end:
            await parts.aclose()
        return reader, parts

    def _read(self, lease: Lease, reader: ReplyReader, part: object) -> None:
        """Read the next bytes of a stream, or its end (None). Raises what the stream raises."""
        node = lease.node.url
        if not isinstance(part, bytes):
            if reader.close():
                return
            raise ConnectionLost(f"the stream ended before the answer {'did' if reader.begun else 'began'}", node=node)
        # A comment says that the connection lives, and nothing of the engine.
        if read_from(node, reader.feed, part) and reader.begun:
            self.runtime.pool.heard(lease)
        if reader.failure is not None:
            raise event_error(node, reader.failure, lease.request.model)

    @owning
    async def _follow(
        self,
        call: Call,
        lease: Lease,
        reader: ReplyReader,
        parts: Parts,
        take: Callable[[], list[Any]],
    ) -> AsyncGenerator[Any, None]:
        """Yield what is taken from the reader until the answer has ended; of events the last item is who answered.

        Raises StreamInterrupted, with the text so far, when the stream fails; it is neither retried nor taken over.
        """
        handed_on = 0
        until, clock = call.request.end_of_stream(), asyncio.get_running_loop().time
        silence = min(self._options.timeouts.silence, call.request.failover.stall_s or LONGEST_S)
        quiet_until = Deadline.after(silence, clock)
        failure, settled = reader.failed, False
        try:
            yield STARTED
            while True:
                if reader.ended:
                    # Before the last part, so that the caller may leave once it has that.
                    settled = True
                    self.dispatcher.settle(call, lease, None)
                for item in take():
                    try:
                        self._check_caller(until)
                    except NPUError as error:
                        failure = error
                        break
                    yield item
                    handed_on = len(reader.texts) if reader.as_bytes else handed_on + 1
                if reader.ended or failure is not None:
                    break
                try:
                    async with self.runtime.calls.open():
                        left, quiet = until.remaining(), quiet_until.remaining()
                        part = await self.dispatcher.guard(lease, lambda: anext(parts, None), until, left, quiet)
                    heard = len(reader.texts)
                    self._read(lease, reader, part)
                    if len(reader.texts) > heard:
                        quiet_until = Deadline.after(silence, clock)
                except NPUError as error:
                    failure = error
        finally:
            if not settled:
                # A caller who leaves in the middle says nothing of the node.
                self.dispatcher.settle(call, lease, failure or asyncio.CancelledError())
            await parts.aclose()
        if failure is not None and not (reader.as_bytes and reader.failure is not None):
            texts = reader.texts[:handed_on]
            raise StreamInterrupted.after(texts, failure, attempts=call.attempts, request_id=call.request.request_id)
        if not reader.as_bytes:
            yield _raw_reply(call, lease, reader.head, reader.costs, reader.said, None)

    def _check_caller(self, until: Deadline) -> None:
        """Raise NPUError where what has come already is not for the caller any more."""
        self.runtime.calls.check()
        if not until.remaining():
            raise DeadlineExceeded("the call's deadline passed before the answer was read; increase `timeout`")

    async def ask_all(self, method: str, path: str, content: bytes, deadline: Deadline) -> list[tuple[str, Reply]]:
        """What each node that can be reached replies with 200 to a request that costs it little."""
        await self.runtime.wait_probed()
        transport = self.runtime.start()

        async def ask(node: str) -> tuple[str, Reply] | None:
            headers = {
                "Content-Type": "application/json",
                "X-Request-ID": messages.new_request_id(),
                "X-Request-Timeout-Ms": str(deadline.remaining_ms()),
            }
            try:
                async with self.runtime.calls.open(), asyncio.timeout(deadline.remaining()):
                    reply = await transport.request(node, method, path, content or None, headers)
            except (NPUError, TimeoutError):
                return None
            return (node, reply) if reply.status == 200 else None

        nodes = [node.url for node in self.runtime.pool.nodes.values() if node.report and not node.probe_failures]
        return [found for found in await asyncio.gather(*map(ask, nodes)) if found is not None]

    async def find_in_stores(self, model: str, deadline: Deadline) -> bool:
        """Whether a node has a model in its store that none lists on /health; it lists and serves it from then on."""
        pool = self.runtime.pool
        if any(node.resolve(model) is not None for node in pool.nodes.values()):
            return False
        found = await self.ask_all("POST", "/api/show", messages.encode({"model": model}), deadline)
        probed = [pool.nodes[url] for url, _ in found if url in pool.nodes]
        await asyncio.gather(*map(self.runtime.prober.probe, probed))
        return any(node.resolve(model) is not None for node in pool.nodes.values())


def _check(lease: Lease, head: Mapping[str, str] | None, *bodies: Any) -> None:
    """Check the model and the device that the head of a reply and its parts name. Raises BadReply.

    The head must name a device that was required.
    """
    if head is not None:
        _check_model(lease, head.get("x-model"))
        _check_device(lease, head.get("x-npu-node-device"))
    for body in bodies:
        if isinstance(body, dict):
            _check_model(lease, body.get("model"))
            if "device" in body:
                _check_device(lease, body["device"])


def _check_device(lease: Lease, device: object) -> None:
    required = lease.request.require_device
    if required not in {None, device}:
        what = "does not name its device" if device is None else "names another device"
        raise BadReply(f"{required} was required, and the answer {what}", node=lease.node.url, contradicts=True)


def _check_model(lease: Lease, answered: object) -> None:
    """Raise BadReply for the answer of another model than the one that was asked, by its id or a listed alias.

    None: the answer does not name its model.
    """
    node, asked = lease.node, lease.request.model
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


def _raw_reply(call: Call, lease: Lease, head: Reply, spent: Costs, said: Any, body: Any) -> RawReply:
    """The reply with this `body`; `said` is what its body or its last events say of its costs."""
    said = said if isinstance(said, dict) else {}
    prompt, completion = usage_of(said)
    # Of a recording nodes count positions of audio, and only those of its first part.
    counted = 0 if lease.request.kind == "transcription" else spent.tokens
    origin = _origin(call, lease, head.headers, spent, said)
    return RawReply(status=head.status, body=body, usage=Usage(prompt or counted, completion), **origin)


def _origin(call: Call, lease: Lease, head: Mapping[str, str], spent: Costs, said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Origin`, for every result of a node."""
    # A stream's device and costs are known only at its end, so the body goes before the headers.
    later, device, emulated = said.get("npu_busy_delta_us"), said.get("device"), said.get("emulated")
    energy = joules(said["joules"]) if "joules" in said else None
    return {
        "source": "node",
        "node": lease.node.url,
        "model": head.get("x-model") or lease.model,
        "device": device if isinstance(device, str) else head.get("x-npu-node-device"),
        "request_id": call.request.request_id,
        "attempts": tuple(call.attempts),
        "route_reason": head.get("x-npu-node-route-reason"),
        "npu_busy_delta_us": later if type(later) is int else spent.busy_us,
        "joules": energy or spent.joules,
        "emulated": emulated if isinstance(emulated, bool) else head.get("x-npu-emulated") == "true",
        "headers": head,
    }


async def _encode(call: Call, form: WholeForm | None, headers: dict[str, str]) -> bytes:
    """The request for all attempts, now that its model is known; its type is put into the headers."""
    content, file = call.content, call.request.file
    if content is None:
        encode = partial(_encoded, call.request, form)
        # Copying a long recording takes longer than the event loop may be held up.
        large = file is not None and len(file[1]) > _LARGE_FILE
        found = await in_daemon_thread(encode, "encode a recording") if large else encode()
        call.content, call.content_type = found
        content = found[0]
    headers["Content-Type"] = call.content_type
    return content


def _encoded(request: Request, form: WholeForm | None) -> tuple[bytes, str]:
    if request.content is not None:
        return asking_for_usage(request.path, request.body, request.content), request.content_type
    body = form.request(request.body) if form else dict(request.body)
    if request.model:
        body["model"] = request.model
    if request.file is not None:
        return messages.encode_form(body, *request.file)
    content = messages.encode(body)
    if form is None and body.get("stream"):
        # Forwarded without the bytes of its caller; a form asks for it itself.
        content = asking_for_usage(request.path, request.body, content)
    return content, request.content_type
