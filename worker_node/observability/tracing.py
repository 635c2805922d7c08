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
from contextlib import contextmanager
from itertools import pairwise

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
_OF_THE_ENGINE = frozenset({"engine", "prefill", "decode"})
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


class Tracing:
    """The tracing of a node; off without a tracer. `flush` is called, in a thread, when the node ends."""

    def __init__(self, tracer: Tracer | None = None, flush: Callable[[], None] = lambda: None) -> None:
        self.enabled = tracer is not None
        self._tracer = NoOpTracer() if tracer is None else tracer
        self._flush = flush
        # What `time.monotonic_ns()` lacks to nanoseconds since the epoch, which spans are dated by.
        self._offset = time.time_ns() - time.monotonic_ns()

    @contextmanager
    def request(
        self, method: str, route: str, headers: Mapping[str, str], request_id: str, arrived: float
    ) -> Iterator[Span]:
        """Trace the HTTP request that is served while the block runs, as a part of the caller's trace if it has one.

        The route is its pattern, not the path that was asked for.
        """
        # The wall clock may have been set, and a laptop that sleeps stops the monotonic one.
        self._offset = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{method} {route}",
            _PROPAGATOR.extract(headers),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route, "npu.request_id": request_id},
            start_time=self._offset + round(arrived * 1e9),
        )
        # A failure has become a response before it gets here, and a caller who leaves is not an error.
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
        finally:
            span.end(time.monotonic_ns() + self._offset)

    @contextmanager
    def operation(self, name: str, attributes: Mapping[str, AttributeValue]) -> Iterator[Operation]:
        """Trace an operation, by the name that its task gives it, while the block runs."""
        if not self.enabled:
            yield UNTRACED
            return
        named = {"gen_ai.operation.name": name, "gen_ai.provider.name": "npu-node"}
        span = self._tracer.start_span(
            name, attributes=named | dict(attributes), start_time=time.monotonic_ns() + self._offset
        )
        operation = Operation(self._tracer, name, span, self._offset)
        try:
            yield operation
        except Exception as error:
            operation.failed(error)
            raise
        finally:
            operation.end()

    async def close(self) -> None:
        await asyncio.to_thread(self._flush)


OFF = Tracing()


def set_response_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute("error.type", str(status))
        span.set_status(StatusCode.ERROR)


class Operation:
    """One inference, from its tokens to its answer. Its spans are made when it ends, from the stages that began.

    Nothing is recorded where the span is not: without tracing, and for requests that are not sampled. A caller may ask
    for `recording` first.
    """

    def __init__(self, tracer: Tracer, name: str, span: Span, offset: int) -> None:
        self.recording = span.is_recording()
        self._tracer = tracer
        self._name = name
        self._span = span
        self._offset = offset
        self._engine_attributes: Attributes = {}
        self._stages = [("tokenize", time.monotonic())]
        self._known_end = False

    def begin(self, stage: str, at: float | None = None) -> None:
        """The stage before ends, and this one begins, now or `at`; the empty name begins none.

        `engine`, or `prefill` and `decode`, are times by the clock of the engine process.
        """
        if self.recording:
            self._stages.append((stage, time.monotonic() if at is None else at))

    def routed(self, route: Route) -> None:
        """The placement is chosen; that took from the tokens until now, the wait for its load included."""
        if self.recording:
            repeated: Attributes = {
                "gen_ai.response.model": route.model,
                "npu.device": route.device.value,
                "npu.emulated": route.emulated,
            }
            self._engine_attributes = repeated
            # The requested model is named by the id that its name stands for: the name itself is the user's text.
            of_route: Attributes = {"gen_ai.request.model": route.model, "gen_ai.usage.input_tokens": route.token_count}
            self._span.set_attributes({**repeated, **of_route, "npu.route_reason": route.reason})
            self._span.update_name(f"{self._name} {route.model}")
            self.begin("")

    def submitted(self, engine: Engine) -> None:
        if self.recording:
            if (pid := engine.status.pid) is not None:
                self._engine_attributes["process.pid"] = pid
            self.begin("queue")

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
        if busy.energy.joules is not None:
            found["npu.energy_joules"] = busy.energy.joules
        self._span.set_attributes(found)
        self.begin("", ended)

    def failed(self, error: Exception) -> None:
        """The operation ends with an error, also where the caller makes an answer of it."""
        if self.recording:
            self._known_end = True
            code = error.code if isinstance(error, NodeError) else type(error).__name__
            # The code says enough; a message may be about what the user wrote.
            self._span.set_attribute("error.type", code)
            self._span.set_status(Status(StatusCode.ERROR, code))

    def end(self) -> None:
        """Send the spans of the operation and its stages."""
        if not self.recording:
            return
        if not self._known_end:
            self._span.set_attribute("npu.abandoned", True)
        self.begin("")

        engine: Span | None = None
        engine_end = 0
        for (stage, since), (_, until) in pairwise(self._stages):
            begins, ends = self._wall(since), self._wall(max(since, until))
            if stage in _OF_THE_ENGINE:
                engine = engine or self._child("engine", self._span, begins, self._engine_attributes)
                engine_end = ends
            if stage not in {"", "engine"}:
                self._child(stage, engine or self._span, begins).end(ends)
        if engine is not None:
            engine.end(engine_end)
        self._span.end(self._wall(self._stages[-1][1]))

    def _child(self, name: str, parent: Span, begins: int, attributes: Attributes | None = None) -> Span:
        return self._tracer.start_span(
            name, trace.set_span_in_context(parent), attributes=attributes, start_time=begins
        )

    def _wall(self, at: float) -> int:
        return self._offset + round(at * 1e9)


UNTRACED = Operation(NoOpTracer(), "", INVALID_SPAN, 0)
