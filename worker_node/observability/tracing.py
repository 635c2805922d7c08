"""The stages of a request as OpenTelemetry spans: all of them in one trace with the caller's.

    POST /inference           SERVER: the HTTP request, from its arrival
    └─ chat smollm2…          the inference
       ├─ tokenize, route, queue
       └─ engine              the job in the engine process, whose pid it names
          └─ prefill, decode

An engine process has no tracer: it reports when it started a job, when it had each token and how long it ran, by the
clock that all processes of a machine share, and the edge process makes the spans from that. Times here are
`time.monotonic()` seconds. A node that does not trace has OpenTelemetry's no-op tracer and does not import its SDK.

Attributes have the names of GenAI's semantic conventions, or `npu.` where these have none. Their values are numbers and
names that the node made itself: no prompt, answer, stop sequence, tool, user's name for a model, or key.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from worker_node import __version__
from worker_node.core.errors import INSTALL_EXTRA, ConfigurationError, NodeError
from worker_node.core.types import NOT_MEASURED, Busy, Route, Usage
from worker_node.engines.supervisor import Engine

Attributes = dict[str, AttributeValue]

_PROPAGATOR = TraceContextTextMapPropagator()
# Attributes of a route that the engine's span repeats.
_ENGINE_ATTRIBUTES = ("gen_ai.response.model", "npu.device", "npu.emulated")
# A collector that accepts and never answers must not hold up the node's end.
_FLUSH_S = 2.0


def open_tracing(*, enabled: bool) -> Tracing:
    """The tracing that the settings ask for: to `OTEL_EXPORTER_OTLP_ENDPOINT` (http://localhost:4318) by OTLP over
    HTTP, sampled by `OTEL_TRACES_SAMPLER` (all), as the service `OTEL_SERVICE_NAME` (npu-node).

    Raises ConfigurationError when what it needs is not installed.
    """
    if not enabled:
        return OFF
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            f"tracing is on and {error.name} is not installed; run {INSTALL_EXTRA.format('tracing')}, or "
            "leave tracing out"
        ) from error
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "npu-node"), "service.version": __version__}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def flush() -> None:
        ending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)

    return Tracing(provider.get_tracer("worker_node", __version__), flush)


class WallClock:
    """Nanoseconds since the epoch. The spans of a request are dated by the offset that holds when it begins, since the
    wall clock may be set, and a laptop that sleeps stops the monotonic one."""

    def __init__(self) -> None:
        self.follow()

    def follow(self) -> None:
        """Follow the wall clock."""
        self._offset = time.time_ns() - time.monotonic_ns()

    def at(self, monotonic: float) -> int:
        """The wall time at `time.monotonic()` seconds."""
        return self._offset + round(monotonic * 1e9)


class Tracing:
    """The tracing of a node; off without a tracer. `flush` is called, in a thread, when the node ends."""

    def __init__(self, tracer: Tracer | None = None, flush: Callable[[], None] = lambda: None) -> None:
        self.enabled = tracer is not None
        self._tracer = NoOpTracer() if tracer is None else tracer
        self._flush = flush
        self._clock = WallClock()

    @contextmanager
    def request(
        self, method: str, route: str, headers: Mapping[str, str], request_id: str, arrived: float
    ) -> Iterator[Span]:
        """Trace the HTTP request that is served while the block runs, as a part of the caller's trace if it has one.

        The route is its pattern, not the path that was asked for.
        """
        self._clock.follow()
        span = self._tracer.start_span(
            f"{method} {route}",
            _PROPAGATOR.extract(headers),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route, "npu.request_id": request_id},
            start_time=self._clock.at(arrived),
        )
        # A failure has become a response before it gets here, and a caller who leaves is not an error.
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
        finally:
            span.end(self._clock.at(time.monotonic()))

    def operation(self, name: str, attributes: Mapping[str, AttributeValue]) -> AbstractContextManager[Operation]:
        """Trace an operation, by the name that its task gives it, while the block runs."""
        if not self.enabled:
            return nullcontext(UNTRACED)
        return self._operation(name, attributes)

    @contextmanager
    def _operation(self, name: str, attributes: Mapping[str, AttributeValue]) -> Iterator[Operation]:
        named = {"gen_ai.operation.name": name, "gen_ai.provider.name": "npu-node"}
        began = self._clock.at(time.monotonic())
        span = self._tracer.start_span(name, attributes=named | dict(attributes), start_time=began)
        operation = Operation(self._tracer, self._clock, span, name)
        try:
            with operation.watch():
                yield operation
        finally:
            operation.end()

    async def close(self) -> None:
        """Send what was not sent yet."""
        await asyncio.to_thread(self._flush)


OFF = Tracing()


def set_response_status(span: Span, status: int) -> None:
    """Record the status of the HTTP response in the span of its request."""
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute("error.type", str(status))
        span.set_status(StatusCode.ERROR)


class Operation:
    """One inference, from its tokens to its answer. Each stage is reported when it is over; `end` closes an open one.

    Nothing is recorded where the span is not: without tracing, and for requests that are not sampled. A caller may ask
    for `recording` first.
    """

    def __init__(self, tracer: Tracer, clock: WallClock, span: Span, name: str) -> None:
        self._tracer = tracer
        self._clock = clock
        self._span = span
        self._name = name
        self.recording = span.is_recording()
        self._engine: Span | None = None
        self._engine_attributes: Attributes = {}
        self._stage = "tokenize"
        self._since = time.monotonic()
        self._known_end = False

    def tokenized(self, began: float) -> None:
        """The prompt was tokenized, from `began` until now."""
        if self.recording:
            self._since = began
            self._next("route", time.monotonic())

    def routed(self, route: Route) -> None:
        """The placement is chosen; that took from the tokens until now, the wait for its load included."""
        if self.recording:
            # The requested model is named by the id that its name stands for: the name itself is the user's text.
            attributes: Attributes = {
                "gen_ai.request.model": route.model,
                "gen_ai.response.model": route.model,
                "gen_ai.usage.input_tokens": route.token_count,
                "npu.device": route.device.value,
                "npu.emulated": route.emulated,
                "npu.route_reason": route.reason,
            }
            self._engine_attributes = {name: attributes[name] for name in _ENGINE_ATTRIBUTES}
            self._span.set_attributes(attributes)
            self._span.update_name(f"{self._name} {route.model}")
            self._next("", time.monotonic())

    def submitted(self, engine: Engine) -> None:
        """The engine is given the job now."""
        if self.recording:
            pid = engine.status.pid
            if pid is not None:
                self._engine_attributes["process.pid"] = pid
            self._next("queue", time.monotonic())

    def started(self, at: float) -> None:
        """The engine process started the job, by its own clock."""
        if self.recording:
            self._next("prefill", at)
            self._engine = self._tracer.start_span(
                "engine",
                trace.set_span_in_context(self._span),
                attributes=self._engine_attributes,
                start_time=self._clock.at(at),
            )

    def ran(self, began: float, ended: float) -> None:
        """The engine process ran a job without tokens from then to then, by its own clock."""
        if self.recording:
            self.started(began)
            self._stage = ""
            self._finish(ended)

    def first_token(self, at: float) -> None:
        """The engine process had the first token."""
        if self.recording:
            self._next("decode", at)

    def answered(
        self,
        usage: Usage,
        *,
        finish_reason: str | None = None,
        busy: Busy = NOT_MEASURED,
        cached: str | None = None,
        ended: float | None = None,
    ) -> None:
        """The answer is complete; the engine process had its last token at `ended`.

        `npu.busy_exclusive` is there only as False: that nobody shared cannot be known.
        """
        if not self.recording:
            return
        self._known_end = True
        found: Attributes = {"gen_ai.usage.input_tokens": usage.prompt_tokens}
        if finish_reason is not None:
            found["gen_ai.usage.output_tokens"] = usage.completion_tokens
            found["gen_ai.response.finish_reasons"] = [finish_reason]
        if cached is not None:
            found["npu.cache"] = cached
        if busy.us is not None:
            found["npu.busy_time_us"] = busy.us
            if busy.shared:
                found["npu.busy_exclusive"] = False
        self._span.set_attributes(found)
        self._finish(time.monotonic() if ended is None else ended)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A failure in the block is the operation's, also where the caller makes an answer of it."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise

    def end(self) -> None:
        """Stop recording."""
        if self.recording:
            if not self._known_end:
                self._span.set_attribute("npu.abandoned", True)
            self._finish(time.monotonic())
            self._span.end(self._clock.at(time.monotonic()))

    def failed(self, error: Exception) -> None:
        """The operation ends with an error."""
        if self.recording:
            self._known_end = True
            code = error.code if isinstance(error, NodeError) else type(error).__name__
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


UNTRACED = Operation(NoOpTracer(), WallClock(), INVALID_SPAN, "")
