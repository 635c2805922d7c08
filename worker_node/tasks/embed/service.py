"""Embed texts: tokenize, choose a placement, look into the cache, run, and count. Every dialect calls `embed`.

Also how embedding models are opened, and the canary that an engine must pass before it is ready.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter

from worker_node.core.errors import BadRequest, ConfigurationError, UnsupportedParameter
from worker_node.core.types import NOT_MEASURED, Busy, Device, Energy, ModelKind, RequestContext, Route, Timing, Usage
from worker_node.encoders.jobs import RowResult
from worker_node.engines.process import Canary
from worker_node.models.directory import EmbeddingCanary, InstalledModel
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation
from worker_node.serving.encoders import EncoderModel, EncoderTask, Floats, known_answers_canary, rows_run
from worker_node.serving.routing import Demand, reject_if_full, select_placement
from worker_node.serving.row_tokenizer import RowTokenizer
from worker_node.serving.run import RoutedResult, Services, run_selected
from worker_node.serving.task import EnginePlan
from worker_node.settings import ModelSettings, NodeSettings

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingReply:
    """`vectors`: float32 (n, dimensions); comparable only to vectors of an equal `space`.

    The space of vectors that are cut is named `SPACE-DIMENSIONS`, as the client expects it. `device_tokens` are those
    that the device computed, padding included, where the engine counts them; `computed_tokens` are those of the
    `computed` texts. `cached` says that all vectors (hit) or some (partial) were computed for an earlier request. The
    request waited for `loading_s` seconds for its model to be loaded.
    """

    route: Route
    vectors: Vectors
    space: str
    usage: Usage
    timing: Timing
    busy: Busy = NOT_MEASURED
    device_tokens: int | None = None
    computed: int = 0
    computed_tokens: int = 0
    cached: Literal["hit", "partial"] | None = None
    loading_s: float = 0.0


async def embed(
    services: Services,
    context: RequestContext,
    texts: Sequence[str | tuple[int, ...]],
    name: str | None = None,
    *,
    truncate: bool = False,
    input_type: str | None = None,
    dimensions: int | None = None,
) -> EmbeddingReply:
    """Return the vectors of the texts, in order, by the model of that `name` or the node's default embedding model.

    All texts may be token ids of the model's own tokenizer, special tokens included, and are used unchanged.
    `input_type` (`query` or `document`) puts the model's own prompt before each. `dimensions` None is as many as the
    model's vectors have.
    """
    with services.tracing.operation("embeddings", {"npu.texts": len(texts)}) as operation:
        began = time.monotonic()
        model = await services.manager.model_of(ModelKind.EMBEDDING, EmbeddingModel, name, context.deadline)
        with model.activity.working():
            check_dimensions(model, dimensions)
            prompted = with_prompt(model, texts, input_type)
            reject_if_full(model.placements, len(texts), context)
            rows = await model.tokenizer.encode(prompted, truncate=truncate, deadline=context.deadline)
            operation.begin("route")
            reply = await _embed_rows(services, model, context, rows, dimensions, operation, began)
        if rows:
            count_embedding(services.telemetry, reply)
        operation.answered(reply.usage, busy=reply.busy, cached=reply.cached)
        return reply


async def _embed_rows(
    services: Services,
    model: EmbeddingModel,
    context: RequestContext,
    rows: list[list[int]],
    dimensions: int | None,
    operation: Operation,
    began: float,
) -> EmbeddingReply:
    """Take what the cache has of the rows, and compute the others in one job."""
    prepared = time.monotonic()
    demand = Demand.of_rows(model, rows, context)
    selection = await select_placement(demand, context, units=len(rows))
    operation.routed(selection.route)

    # A recovery of the device is announced a moment after what it aborted: vectors from before it are not used.
    origin = (selection.route.device, selection.placement.engine.recoveries)

    # Nor does a vector that was computed for an earlier request prove anything for this one.
    known = model.cache.look_up(origin, rows, usable=context.require_device is not Device.NPU)
    missing = [index for index, vector in enumerate(known) if vector is None]
    answer: RoutedResult[RowResult] | None = None
    if missing:
        wanted = [rows[index] for index in missing]
        run = rows_run(wanted, demand, context, began, prepared)
        answer = await run_selected(services, run, selection, operation)
        computed = answer.result.rows(len(wanted))
        if answer.route.device is selection.route.device:
            model.cache.keep(origin, wanted, computed)
        for index, vector in zip(missing, computed, strict=True):
            known[index] = vector

    vectors = np.asarray([vector for vector in known if vector is not None], np.float32)
    vectors = vectors.reshape(len(rows), model.dimensions)
    reply = EmbeddingReply(
        selection.route,
        cut(vectors, dimensions),
        model.space if dimensions in {None, model.dimensions} else f"{model.space}-{dimensions}",
        Usage(demand.token_count),
        Timing(queue=0.0, tokenize=0.0, inference=0.0, total=(time.monotonic() - context.arrived) * 1e3),
        busy=Busy(energy=Energy(reason="no device ran")),
        cached="hit" if rows else None,
        loading_s=selection.loading_s,
    )
    if answer is None:
        return reply
    return replace(
        reply,
        route=answer.route,
        timing=answer.timing,
        busy=answer.result.busy,
        device_tokens=answer.result.device_tokens,
        computed=len(missing),
        cached="partial" if len(missing) < len(rows) else None,
        computed_tokens=sum(len(rows[index]) for index in missing),
    )


def count_embedding(telemetry: Telemetry, reply: EmbeddingReply) -> None:
    own, labels, count = telemetry.own(EmbeddingMetrics), (reply.route.model, reply.route.device), len(reply.vectors)
    own.texts.labels(*labels).inc(count)
    own.hits.labels(*labels).inc(count - reply.computed)
    own.misses.labels(*labels).inc(reply.computed)
    if reply.device_tokens is not None:
        own.device_tokens.labels(*labels).inc(reply.device_tokens)
        own.computed_tokens.labels(*labels).inc(reply.computed_tokens)
    telemetry.finished(reply.route, reply.usage, reply.timing, busy=reply.busy, ran=reply.computed > 0)


class EmbeddingCache:
    """The vectors of the `capacity` most recently used texts, so that embedding a text again costs nothing.

    A vector is only returned for the same token ids and `origin`: what computed it, which the reply names.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._vectors: OrderedDict[tuple[Hashable, tuple[int, ...]], Vectors] = OrderedDict()

    def look_up(self, origin: Hashable, rows: Sequence[Sequence[int]], *, usable: bool = True) -> list[Vectors | None]:
        """Return the vector of each row of token ids; None where it is not kept, or none is `usable`."""
        if not (self.capacity and usable):
            return [None] * len(rows)
        found: list[Vectors | None] = []
        for row in rows:
            key = (origin, tuple(row))
            found.append(self._vectors.get(key))
            if found[-1] is not None:
                self._vectors.move_to_end(key)
        return found

    def keep(self, origin: Hashable, rows: Sequence[Sequence[int]], vectors: Vectors) -> None:
        """Store the vectors, one a row, and evict the least recently used ones."""
        # Of a request larger than the cache only the last rows, or its own first rows would be evicted by them.
        for row, vector in list(zip(rows, vectors, strict=True))[-self.capacity :] if self.capacity else ():
            self._vectors[origin, tuple(row)] = vector.copy()
        while len(self._vectors) > self.capacity:
            self._vectors.popitem(last=False)


@dataclass(eq=False, slots=True)
class EmbeddingModel(EncoderModel):
    """A served embedding model; `space` and `dimensions` are as in `InstalledModel`, and never None."""

    space: str
    dimensions: int
    cache: EmbeddingCache = field(default_factory=EmbeddingCache)

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"dimensions": self.dimensions, "space": self.space}
        if self.installed.prompts:
            facts["input_types"] = sorted(self.installed.prompts)
        if self.installed.matryoshka:
            facts["matryoshka"] = list(self.installed.matryoshka)
        return facts


# What a text is, by the names that callers use for it.
INPUT_TYPES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "search_document": "document",
    "passage": "document",
}


def with_prompt(
    model: EmbeddingModel, texts: Sequence[str | tuple[int, ...]], input_type: str | None
) -> Sequence[str | tuple[int, ...]]:
    """The texts with the model's prompt for `input_type` before each; None leaves them as they are.

    Raises UnsupportedParameter (the model has no prompts), BadRequest (another type, or token ids).
    """
    if input_type is None:
        return texts
    kind = INPUT_TYPES.get(input_type)
    if kind is None:
        raise BadRequest(
            f"input_type must be one of {', '.join(INPUT_TYPES)}, got {input_type[:64]!r}", param="input_type"
        )
    if not model.installed.prompts:
        raise UnsupportedParameter(
            f"input_type: {model.id} declares no prompts, it embeds queries and documents alike; leave it out",
            param="input_type",
        )

    prompt = model.installed.prompts[kind]
    prompted: list[str | tuple[int, ...]] = []
    for text in texts:
        if not isinstance(text, str):
            raise BadRequest("input_type: token ids get no prompt; send texts", param="input_type")
        prompted.append(prompt + text)
    return prompted


def check_dimensions(model: EmbeddingModel, dimensions: int | None) -> None:
    """Raises UnsupportedParameter for vectors of a size that the model does not declare."""
    if dimensions in (None, model.dimensions) or dimensions in model.installed.matryoshka:
        return
    if smaller := model.installed.matryoshka:
        sizes = ", ".join(map(str, (*smaller, model.dimensions)))
        raise UnsupportedParameter(f"dimensions: {model.id} can give {sizes}", param="dimensions")
    raise UnsupportedParameter(
        f"dimensions: the vectors of {model.id} have {model.dimensions} and it was not trained to be cut",
        param="dimensions",
    )


def cut(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first `dimensions` numbers of each row, at unit length again; a row of zeros stays one."""
    if dimensions is None or dimensions >= vectors.shape[1]:
        return vectors
    head = vectors[:, :dimensions]
    norms = np.linalg.norm(head, axis=1, keepdims=True)
    # Not in place: the rows may be the cache's, or the engine's bytes.
    return (head / np.where(norms > 0, norms, 1)).astype(np.float32, copy=False)


class EmbeddingMetrics:
    unit = "texts"

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, labelnames=("model", "device"), registry=registry)
        self.made = self.texts = counter("npu_node_embedded_texts", "Texts embedded")
        self.device_tokens = counter(
            "npu_node_embedding_device_tokens", "Tokens computed for embeddings, padding included"
        )
        self.computed_tokens = counter(
            "npu_node_embedding_computed_tokens", "Tokens of the texts computed for embeddings, without padding"
        )
        self.hits = counter("npu_node_embedding_cache_hits", "Texts whose vector was in the cache")
        self.misses = counter("npu_node_embedding_cache_misses", "Texts whose vector was not")


def _cosine_fault(found: Floats, expected: Floats, least: float) -> str | None:
    """Whether the vectors of known texts point elsewhere than the CPU's did."""
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = np.einsum("nd,nd->n", found, expected) / norms
    worst = float(np.nan_to_num(cosines, nan=-1.0).min())
    return f"cosine {worst:.4f} to the known vectors, at least {least} is right" if worst < least else None


class _Embed(EncoderTask[EmbeddingModel]):
    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> EmbeddingModel:  # noqa: ARG002
        if installed.space is None or installed.dimensions is None:
            raise ConfigurationError(f"{installed.path}: an embedding model without dimensions or space; pull it again")
        return EmbeddingModel(
            installed,
            RowTokenizer(installed.path, installed.context_limit),
            installed.space,
            installed.dimensions,
            EmbeddingCache(settings.embedding_cache),
        )

    def canary(self, model: EmbeddingModel, wanted: ModelSettings, plan: EnginePlan) -> Canary | None:
        known = model.installed.canary
        if not isinstance(known, EmbeddingCanary):
            return None
        rows = model.tokenizer.rows(known.texts, truncate=False)
        fault = partial(_cosine_fault, least=known.min_cosine)
        return known_answers_canary(rows, known.vectors, plan, wanted, fault)


EMBED = _Embed()
