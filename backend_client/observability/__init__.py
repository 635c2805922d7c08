"""Prometheus metrics and OpenTelemetry spans, with the names of the GenAI semantic conventions.

    from backend_client.observability import instrument

    client = instrument(InferenceClient.from_settings())

Needs the extra `observability`. Spans go to whatever tracer provider the application has set up. Nodes are sent the
span's `traceparent`, so that their spans belong to the same trace; the cloud is not. Metrics go to the default
registry, or the one given. No prompt, answer or key is an attribute or a label.

| metric | labels |
|---|---|
| `gen_ai_client_operation_duration_seconds` (histogram) | operation, source, model, error |
| `gen_ai_client_token_usage` (histogram) | operation, source, model, type (input, output) |
| `npu_client_attempts_total` | node, outcome: each try, so the retries too |

The labels are the conventions' attributes by shorter names: `operation` is chat, text_completion (a raw prompt),
embeddings, rerank, transcribe (translations too), tokenize or detokenize, `source` (node, cloud) stands for the
provider, `model` is the one that answered, `error` is an exception's class. Chats and completions have output tokens,
transcriptions no tokens at all. Beside these there is what `state_metrics` reads from the clients: nodes, breakers,
the retry budget, what the cloud cost."""

# May import the clients and what is below them. Begin reading with `instrument`; `state` reads what the clients know.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from backend_client.calls import Backend, BaseClient
from backend_client.client import InferenceClient, NPUClient
from backend_client.errors import NPUError
from backend_client.http.messages import Request
from backend_client.http.replies import Forwarded, asks_for_stream
from backend_client.http.stream_forms import EventStream, finish_reason_in
from backend_client.lifetime import STARTED, owning
from backend_client.observability.attributes import of_answer, of_request, of_server, operation_name, tokens_of
from backend_client.observability.state import StateCollector
from backend_client.results import Attempt, EmbedBatch, Origin, RawReply, Source, Usage
from backend_client.sync import Blocking

C = TypeVar("C", bound=BaseClient | Blocking[Any])

# Only this: the application's baggage is private to it.
_PROPAGATOR = TraceContextTextMapPropagator()
# From a cached embedding's millisecond to a long generation's minutes.
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# The conventions': powers of 4.
_TOKENS = tuple(4**power for power in range(14))


class Metrics:
    """The metrics of the clients of one registry: `Metrics(registry)` is the same object each time."""

    _of: ClassVar[WeakKeyDictionary[CollectorRegistry, Metrics]] = WeakKeyDictionary()
    _lock: ClassVar[Lock] = Lock()

    def __new__(cls, registry: CollectorRegistry = REGISTRY) -> Metrics:  # noqa: PYI034  (one for each registry)
        with cls._lock:
            made = cls._of.get(registry)
            if made is None:
                made = cls._of[registry] = super().__new__(cls)
                made._register(registry)
        return made

    def _register(self, registry: CollectorRegistry) -> None:
        self.duration = Histogram(
            "gen_ai_client_operation_duration_seconds",
            "Duration of a call, retries and fallback included.",
            ("operation", "source", "model", "error"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.tokens = Histogram(
            "gen_ai_client_token_usage",
            "Tokens of an answered call, as the models count them.",
            ("operation", "source", "model", "type"),
            buckets=_TOKENS,
            registry=registry,
        )
        self.attempts = Counter(
            "npu_client_attempts",
            "Requests to nodes and to the cloud, by how they ended.",
            ("node", "outcome"),
            registry=registry,
        )
        self.state = StateCollector()
        registry.register(self.state)


def instrument(client: C, *, metrics: Metrics | None = None, tracer: Tracer | None = None) -> C:
    """Observe every call of a client, blocking or not, and return it.

    Without `metrics`, they go to the default registry. Call it for as many clients as there are; a client that the
    same registry observes already is returned as it is.
    """
    metrics = metrics or Metrics()
    tracer = tracer or trace.get_tracer("backend_client")
    calls = client.inner if isinstance(client, Blocking) else client
    asked: Source = "node" if isinstance(calls, NPUClient | InferenceClient) else "cloud"
    if not _observes(calls.core.backend, metrics):
        calls.core.backend = _ObservedBackend(calls.core.backend, metrics, tracer, asked)
    metrics.state.watch(calls)
    return client


@dataclass(slots=True)
class _Observation:
    """One call that is under way."""

    span: Span
    origin: Origin | None = None
    usage: Usage | None = None
    finish_reason: str = ""

    def answered(self, origin: Origin, usage: Usage, finish_reason: str) -> None:
        self.origin, self.usage, self.finish_reason = origin, usage, finish_reason

    def traced(self, request: Request) -> Request:
        """The request, with the headers that make the node's spans children of this one."""
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, trace.set_span_in_context(self.span))
        return replace(request, trace=headers)


class _ObservedBackend:
    """A backend whose calls are measured; `asked` is whom they go to first."""

    def __init__(self, inner: Backend, metrics: Metrics, tracer: Tracer, asked: Source) -> None:
        self.inner = inner
        self.metrics = metrics
        self._tracer = tracer
        self._asked: Source = asked

    async def embed(self, request: Request) -> EmbedBatch:
        """Embed, observed."""
        with self._observed(request) as seen:
            batch = await self.inner.embed(seen.traced(request))
            seen.answered(batch, batch.usage, "")
        return batch

    async def send(self, request: Request) -> RawReply:
        """Send a request, observed."""
        with self._observed(request) as seen:
            reply = await self.inner.send(seen.traced(request))
            seen.answered(reply, reply.usage, finish_reason_in(reply.body if isinstance(reply.body, dict) else None))
        return reply

    async def open(self, request: Request) -> EventStream:
        """The same as a stream, observed from the opening to the last event."""
        with ExitStack() as observed:
            seen = observed.enter_context(self._observed(request, stream=True))
            events = await self.inner.open(seen.traced(request))
            return _follow(events, seen, observed.pop_all())

    async def forward(self, request: Request) -> Forwarded:
        """Send a request that came as bytes, observed to the end of its reply."""
        with ExitStack() as observed:
            seen = observed.enter_context(self._observed(request, stream=asks_for_stream(request)))
            found = await self.inner.forward(seen.traced(request))
            if isinstance(found.content, bytes):
                seen.answered(found.origin_now(), found.count.usage, "")
                return found
            return replace(found, content=_follow_bytes(found, found.content, seen, observed.pop_all()))

    async def close(self) -> None:
        """Close what is inside."""
        await self.inner.close()

    @contextmanager
    def _observed(self, request: Request, *, stream: bool = False) -> Iterator[_Observation]:
        operation = operation_name(request)
        attributes = of_request(request, operation, self._asked, stream=stream)
        began = time.perf_counter()
        # A request that the gateway takes over belongs to the trace of its headers.
        parent = _PROPAGATOR.extract(request.extra_headers) if "traceparent" in request.extra_headers else None
        # A stream's span cannot be the current one: it is open while the caller's own code runs.
        span = self._tracer.start_span(
            f"{operation} {request.model}" if request.model else operation,
            parent,
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        seen = _Observation(span)
        error = ""
        try:
            yield seen
        except Exception as failure:
            error = type(failure).__name__
            span.set_attribute("error.type", error)
            # Not record_exception, which keeps the traceback: the type says enough.
            span.set_status(Status(StatusCode.ERROR, error))
            if isinstance(failure, NPUError) and failure.attempts:
                self._count_attempts(failure.attempts)
                last = failure.attempts[-1]
                span.set_attributes(of_server(last.source, last.node))
            raise
        except (asyncio.CancelledError, GeneratorExit):
            # The caller left, which is not an error.
            error = "cancelled"
            raise
        finally:
            self._finish(operation, seen, time.perf_counter() - began, error)
            span.end()

    def _finish(self, operation: str, seen: _Observation, seconds: float, error: str) -> None:
        origin, usage = seen.origin, seen.usage
        source, model = (origin.source, origin.model) if origin else ("", "")
        self.metrics.duration.labels(operation, source, model, error).observe(seconds)
        if origin is None or usage is None:
            return
        self._count_attempts(origin.attempts)
        seen.span.set_attributes(of_answer(operation, origin, usage, seen.finish_reason))
        for kind, count in tokens_of(operation, usage).items():
            self.metrics.tokens.labels(operation, source, model, kind).observe(count)

    def _count_attempts(self, attempts: tuple[Attempt, ...]) -> None:
        for attempt in attempts:
            self.metrics.attempts.labels(attempt.node, attempt.outcome).inc()


def _observes(backend: Backend, metrics: Metrics) -> bool:
    while isinstance(backend, _ObservedBackend):
        if backend.metrics is metrics:
            return True
        backend = backend.inner
    return False


@owning
async def _follow(events: EventStream, seen: _Observation, observed: ExitStack) -> EventStream:
    reason = ""
    with observed:
        try:
            yield STARTED
            async for item in events:
                if isinstance(item, RawReply):
                    seen.answered(item, item.usage, reason)
                else:
                    reason = item.finish_reason or reason
                yield item
        finally:
            await events.aclose()


@owning
async def _follow_bytes(
    found: Forwarded, content: AsyncGenerator[bytes, None], seen: _Observation, observed: ExitStack
) -> AsyncGenerator[bytes, None]:
    with observed:
        try:
            yield STARTED
            async for part in content:
                yield part
            seen.answered(found.origin_now(), found.count.usage, "")
        finally:
            await content.aclose()
