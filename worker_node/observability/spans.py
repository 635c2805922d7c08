"""The stages of a request as OpenTelemetry spans: all of them in one trace with the caller's.

    POST /inference           SERVER: the HTTP request, from its arrival
    └─ chat smollm2…          the inference
       ├─ tokenize, route, queue
       └─ engine              the job in the engine process, whose pid it names
          └─ prefill, decode

An engine process has no tracer of its own: it tells when it took a job up, when it had each token and how long it
ran, by the clock that all processes of a machine share, and the edge process makes the spans from that."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from worker_node import __version__
from worker_node.core.errors import NodeError
from worker_node.core.types import RequestContext, Route, Usage
from worker_node.engines.protocol import Engine
from worker_node.observability.tracing import (
    ENGINE,
    NOTHING,
    Attributes,
    Operation,
    ServerRequest,
    Tracing,
    WallClock,
    of_answer,
    of_busy_time,
    of_operation,
    of_route,
)

_PROPAGATOR = TraceContextTextMapPropagator()


class SpanTracing(Tracing):
    """Tracing with a tracer. `flush` is called, in a thread, when the node ends."""

    enabled = True

    def __init__(self, tracer: Tracer, flush: Callable[[], None]) -> None:
        self._tracer = tracer
        self._flush = flush
        self._clock = WallClock()

    @contextmanager
    def request(
        self, method: str, route: str, headers: Mapping[str, str], request_id: str, arrived: float, /
    ) -> Iterator[ServerRequest]:
        """See `Tracing.request`."""
        self._clock.look()
        span = self._tracer.start_span(
            f"{method} {route}",
            _PROPAGATOR.extract(headers),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route, "npu.request_id": request_id},
            start_time=self._clock.at(arrived),
        )
        # A failure has become a response before it gets here, and a caller who leaves is no error.
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield _ServedRequest(span)
        finally:
            span.end(self._clock.now())

    @contextmanager
    def operation(
        self, name: str, context: RequestContext, attributes: Mapping[str, float | str] = NOTHING, /
    ) -> Iterator[Operation]:
        """See `Tracing.operation`."""
        if context.dry_run:
            yield Operation()
            return
        with self._operation(name, attributes) as operation:
            yield operation

    async def close(self) -> None:
        """See `Tracing.close`."""
        await asyncio.to_thread(self._flush)

    @contextmanager
    def _operation(self, name: str, attributes: Mapping[str, AttributeValue]) -> Iterator[Operation]:
        span = self._tracer.start_span(
            name, attributes=of_operation(name) | dict(attributes), start_time=self._clock.now()
        )
        if not span.is_recording():
            # It was not sampled, and its stages would not be either: they need not be recorded.
            yield Operation()
            return
        operation = _TracedOperation(self._tracer, self._clock, span, name)
        try:
            with operation.watch():
                yield operation
        finally:
            operation.end()


class _ServedRequest(ServerRequest):
    def __init__(self, span: Span) -> None:
        self._span = span

    def responded(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(StatusCode.ERROR)


class _TracedOperation(Operation):
    """Makes the span of each stage when the stage is over; `end` closes what was broken off."""

    def __init__(self, tracer: Tracer, clock: WallClock, span: Span, name: str) -> None:
        self._tracer = tracer
        self._clock = clock
        self._span = span
        self._name = name
        self._engine: Span | None = None
        self._engine_attributes: Attributes = {}
        self._stage = "tokenize"
        self._since = time.monotonic()
        self._known_end = False

    def tokenized(self, began: float) -> None:
        self._since = began
        self._next("route", time.monotonic())

    def routed(self, route: Route) -> None:
        attributes = of_route(route)
        self._engine_attributes = {name: attributes[name] for name in ENGINE}
        self._span.set_attributes(attributes)
        self._span.update_name(f"{self._name} {route.model}")
        self._next("", time.monotonic())

    def submitted(self, engine: Engine) -> None:
        pid = engine.status.pid
        if pid is not None:
            self._engine_attributes["process.pid"] = pid
        self._next("queue", time.monotonic())

    def ran(self, began: float, ended: float) -> None:
        self.started(began)
        self._stage = ""
        self._finish(ended)

    def started(self, at: float) -> None:
        self._next("prefill", at)
        self._engine = self._tracer.start_span(
            "engine",
            trace.set_span_in_context(self._span),
            attributes=self._engine_attributes,
            start_time=self._clock.at(at),
        )

    def first_token(self, at: float) -> None:
        self._next("decode", at)

    def ended(self, at: float) -> None:
        self._finish(at)

    def answered(
        self,
        usage: Usage,
        *,
        finish_reason: str | None = None,
        busy_us: int | None = None,
        busy_shared: bool = False,
        cached: str | None = None,
    ) -> None:
        self._known_end = True
        self._span.set_attributes(of_answer(usage, finish_reason, cached))
        self._span.set_attributes(of_busy_time(busy_us, shared=busy_shared))
        self._finish(time.monotonic())

    @contextmanager
    def watch(self) -> Iterator[None]:
        try:
            yield
        except NodeError as error:
            self._failed(error.code)
            raise
        except Exception as error:
            self._failed(type(error).__name__)
            raise

    def end(self) -> None:
        """Stop recording."""
        if not self._known_end:
            self._span.set_attribute("npu.abandoned", True)
        self._finish(time.monotonic())
        self._span.end(self._clock.now())

    def _failed(self, code: str) -> None:
        self._known_end = True
        # The code says enough; a message may be about what the user wrote.
        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR, code))

    def _finish(self, at: float) -> None:
        self._next("", at)
        if self._engine is not None:
            self._engine.end(self._clock.at(at))
            self._engine = None

    def _next(self, stage: str, at: float) -> None:
        """The stage that is under way ends at `at`, and another one begins."""
        if self._stage:
            parent = trace.set_span_in_context(self._engine or self._span)
            span = self._tracer.start_span(self._stage, parent, start_time=self._clock.at(self._since))
            span.end(self._clock.at(max(at, self._since)))
        self._stage, self._since = stage, at


# Spans to a collector by OTLP over HTTP, as the standard `OTEL_*` environment says.

# A collector that accepts and never answers must not hold up the node's end.
_FLUSH_S = 2.0


def otlp_tracing() -> SpanTracing:
    """Tracing to `OTEL_EXPORTER_OTLP_ENDPOINT` (http://localhost:4318), sampled by `OTEL_TRACES_SAMPLER` (all).

    The service's name is `OTEL_SERVICE_NAME`, else npu-node.
    """
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "npu-node"), "service.version": __version__}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def flush() -> None:
        ending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)

    return SpanTracing(provider.get_tracer("worker_node", __version__), flush)
