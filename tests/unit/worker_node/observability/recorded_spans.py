"""A tracing whose spans stay in this process."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from worker_node.observability.tracing import Tracing


class Recorded:
    """The `tracing` and its finished spans; a name that came several times has its last span."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider.get_tracer("test"))

    @property
    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def tree(self):
        names = {span.context.span_id: span.name for span in self.exporter.get_finished_spans()}
        return {
            span.name: names.get(span.parent.span_id) if span.parent else None
            for span in self.exporter.get_finished_spans()
        }
