"""Spans to a collector by OTLP over HTTP, as the standard `OTEL_*` environment says."""

from __future__ import annotations

import os
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from worker_node import __version__
from worker_node.tracing.spans import SpanTracing

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
