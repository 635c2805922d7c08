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
| `npu_client_affinity_total` | outcome: `hit`, a later request of a conversation went to its node; `miss`, it did not |

The labels are the conventions' attributes by shorter names: `operation` is chat, text_completion (a raw prompt),
embeddings, rerank, transcribe (translations too), tokenize or detokenize, `source` (node, cloud) stands for the
provider, `model` is the one that answered, `error` is an exception's class. Chats and completions have output tokens,
transcriptions no tokens at all. Further gauges show the state of the clients: nodes, breakers, the retry
budget, what the cloud cost."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakSet

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend_client.calls import Backend, BaseClient
from backend_client.client import InferenceClient, NPUClient
from backend_client.cloud import Ledger
from backend_client.errors import NPUError
from backend_client.fleet.node import BreakerState
from backend_client.http.messages import Request
from backend_client.http.replies import Forwarded, asks_for_stream
from backend_client.http.routes import ROUTES
from backend_client.http.stream_forms import EventStream, StreamEvent, finish_reason_in
from backend_client.lifetime import STARTED, owning
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
        self.state = _StateCollector()
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
        with self._observed(request) as seen:
            batch = await self.inner.embed(seen.traced(request))
            seen.answered(batch, batch.usage, "")
        return batch

    async def send(self, request: Request) -> RawReply:
        with self._observed(request) as seen:
            reply = await self.inner.send(seen.traced(request))
            seen.answered(reply, reply.usage, finish_reason_in(reply.body if isinstance(reply.body, dict) else None))
        return reply

    async def open(self, request: Request) -> EventStream:
        """The same as a stream, observed from the opening to the last event."""
        with ExitStack() as observed:
            seen = observed.enter_context(self._observed(request, stream=True))
            events = await self.inner.open(seen.traced(request))
            return _observed_to_end(events, seen, observed.pop_all())

    async def forward(self, request: Request) -> Forwarded:
        """Send a request that came as bytes, observed to the end of its reply."""
        with ExitStack() as observed:
            seen = observed.enter_context(self._observed(request, stream=asks_for_stream(request)))
            found = await self.inner.forward(seen.traced(request))
            if isinstance(found.content, bytes):
                seen.answered(found.origin_now(), found.count.usage, "")
                return found
            return replace(found, content=_observed_to_end(found.content, seen, observed.pop_all(), found))

    async def close(self) -> None:
        await self.inner.close()

    @contextmanager
    def _observed(self, request: Request, *, stream: bool = False) -> Iterator[_Observation]:
        operation = _operation_name(request)
        attributes = _of_request(request, operation, self._asked, stream=stream)
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
                span.set_attributes(_of_server(last.source, last.node))
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
        seen.span.set_attributes(_of_answer(operation, origin, usage, seen.finish_reason))
        for kind, count in _tokens_of(operation, usage).items():
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
async def _observed_to_end(
    items: AsyncGenerator[Any, None], seen: _Observation, observed: ExitStack, found: Forwarded | None = None
) -> AsyncGenerator[Any, None]:
    """The items of a stream, of events or the bytes that were `found`, observed to the last one."""
    with observed:
        try:
            yield STARTED
            async for item in items:
                if isinstance(item, StreamEvent):
                    seen.finish_reason = item.finish_reason or seen.finish_reason
                elif isinstance(item, RawReply):
                    seen.answered(item, item.usage, seen.finish_reason)
                yield item
            if found is not None:
                seen.answered(found.origin_now(), found.count.usage, "")
        finally:
            await items.aclose()


_Attributes = dict[str, AttributeValue]

_TRANSCRIBE: Final = "transcribe"
# Operations whose answers are made of tokens.
_WRITING: Final = frozenset({"chat", "text_completion"})

# The conventions' own value for whatever speaks OpenAI's API; there is none for nodes.
_PROVIDERS: Final[dict[Source, str]] = {"node": "npu-node", "cloud": "openai"}
_PORTS: Final = {"http": 80, "https": 443}
_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def _operation_name(request: Request) -> str:
    """`embeddings`, `rerank`, `transcribe`, `tokenize`, `detokenize`, `chat`, or `text_completion` for a prompt that is
    continued as it stands; as nodes call it."""
    raw = request.path == "/inference" and request.body.get("raw")
    return "text_completion" if raw else ROUTES[request.path].operation


def _tokens_of(operation: str, usage: Usage) -> Mapping[str, int]:
    """The tokens that an answer counts, by the conventions' `type`. A recording has none: its size is its seconds."""
    found = {} if operation == _TRANSCRIBE else {"input": usage.prompt_tokens}
    return found | ({"output": usage.completion_tokens} if operation in _WRITING else {})


def _of_request(request: Request, operation: str, asked: Source, *, stream: bool) -> _Attributes:
    """What is known before anybody answers; `asked` is whom the call goes to first."""
    found: _Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDERS[asked]}
    if request.model:
        found["gen_ai.request.model"] = request.model
    if stream:
        found["gen_ai.request.stream"] = True
    given = {{"max_new_tokens": "max_tokens"}.get(name, name): value for name, value in request.body.items()}
    return found | {
        f"gen_ai.request.{name}": given[name] for name in _SAMPLING if isinstance(given.get(name), int | float)
    }


def _of_server(source: Source, url: str) -> _Attributes:
    """Who was asked last: the provider, and its host and port."""
    found: _Attributes = {"gen_ai.provider.name": _PROVIDERS[source]}
    parts = urlsplit(url)
    if parts.hostname:
        found["server.address"] = parts.hostname
        found["server.port"] = parts.port or _PORTS.get(parts.scheme, _PORTS["http"])
    return found


def _of_answer(operation: str, origin: Origin, usage: Usage, finish_reason: str) -> _Attributes:
    """Who answered, and what it took."""
    found = _of_server(origin.source, origin.node) | {
        "gen_ai.response.model": origin.model,
        "gen_ai.response.id": origin.request_id,
        "npu.device": origin.device or "",
        "npu.attempts": len(origin.attempts),
    }
    found |= {f"gen_ai.usage.{kind}_tokens": count for kind, count in _tokens_of(operation, usage).items()}
    if finish_reason:
        found["gen_ai.response.finish_reasons"] = [finish_reason]
    return found


class _StateCollector(Collector):
    """Reads the clients that it watches; one that was garbage-collected is not watched any more."""

    def __init__(self) -> None:
        self._clients: WeakSet[BaseClient] = WeakSet()

    def watch(self, client: BaseClient) -> None:
        self._clients.add(client)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the metrics are known only when they are read."""
        return ()

    def collect(self) -> Iterable[Metric]:
        clients = list(self._clients)
        fleets = [fleet for client in clients if (fleet := _fleet(client)) is not None]
        yield from _nodes(fleets, clients)
        yield from _budgets(fleets)
        yield from _ledgers([client.ledger for client in clients if isinstance(client, InferenceClient)])


def _fleet(client: BaseClient) -> NPUClient | None:
    if isinstance(client, InferenceClient):
        return client.npu
    return client if isinstance(client, NPUClient) else None


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, labels: str, values: Mapping[Any, float]
) -> Metric:
    """The values by label, or by a tuple of several labels."""
    family = kind(name, text, labels=labels.split())
    for key, value in values.items():
        family.add_metric((key,) if isinstance(key, str) else key, float(value))
    return family


def _nodes(fleets: list[NPUClient], clients: list[BaseClient]) -> Iterable[Metric]:
    usable: dict[str, bool] = {}
    in_flight: collections.Counter[str] = collections.Counter()
    breakers: collections.Counter[tuple[str, str]] = collections.Counter()
    for fleet in fleets:
        for node in fleet.status():
            usable[node.url] = usable.get(node.url, True) and node.usable
            in_flight[node.url] += node.in_flight
            breakers[node.url, node.breaker.value] += 1
    for client in clients:
        breaker = client.cloud_breaker if isinstance(client, InferenceClient) else None
        if breaker is not None:
            breakers["cloud", breaker.value] += 1
    gauge = partial(_labelled, GaugeMetricFamily)
    yield gauge("npu_client_node_usable", "1 if requests are sent to the node", "node", usable)
    yield gauge("npu_client_in_flight", "Requests of this process under way there", "node", in_flight)
    text = "Clients of this process whose breaker is in that state"
    known = {(url, state.value): breakers[url, state.value] for url, _ in sorted(breakers) for state in BreakerState}
    yield gauge("npu_client_breaker_state", text, "node state", known)


def _budgets(fleets: list[NPUClient]) -> Iterable[Metric]:
    budgets = [fleet.fleet.dispatcher.budget for fleet in fleets]
    if budgets:
        text = "Retries that could be made now, of the client that could make fewest"
        yield GaugeMetricFamily("npu_client_retry_budget", text, value=min(budget.balance for budget in budgets))
    text = "Retries that the empty retry budget forbade"
    yield CounterMetricFamily("npu_client_retries_refused", text, value=sum(budget.refused for budget in budgets))
    affinities = [fleet.fleet.runtime.pool.affinity for fleet in fleets]
    kept, moved = sum(each.hits for each in affinities), sum(each.misses for each in affinities)
    text = "Requests of a conversation that went to its node (hit), or to another one (miss)"
    yield _labelled(CounterMetricFamily, "npu_client_affinity", text, "outcome", {"hit": kept, "miss": moved})


def _ledgers(ledgers: list[Ledger]) -> Iterable[Metric]:
    text = "Calls that were answered, and where"
    local, cloud = sum(ledger.local.calls for ledger in ledgers), sum(ledger.cloud.calls for ledger in ledgers)
    yield _labelled(CounterMetricFamily, "npu_client_served_calls", text, "source", {"node": local, "cloud": cloud})
    text = "Energy that nodes used during these answers, where they measured it; models that ran together each count it"
    yield CounterMetricFamily("npu_client_joules", text, value=sum(ledger.local.joules for ledger in ledgers))
    text = "What the cloud cost since the process started, in the currency of the prices"
    cost = sum(ledger.cloud.cost for ledger in ledgers)
    yield CounterMetricFamily("npu_client_cloud_cost", text, value=float(cost))
    caps = [ledger.cap for ledger in ledgers if ledger.cap is not None]
    if caps:
        text = "What the cloud may cost in the life of the process, in the same currency"
        yield GaugeMetricFamily("npu_client_cloud_spend_cap", text, value=float(sum(caps)))
