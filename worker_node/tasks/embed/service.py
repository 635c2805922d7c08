"""Embed texts: tokenize, choose a placement, look into the cache, run, and count. Every dialect calls `embed`."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter

from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.core.types import NOT_MEASURED, Busy, Device, ModelKind, RequestContext, Route, Timing, Usage
from worker_node.encoders.jobs import RowResult, row_job
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import ServedModel
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation
from worker_node.scheduling.admission import Work
from worker_node.serving.routing import Demand, reject_if_full, select_placement
from worker_node.serving.run import Proof, Services, SingleRun, model_of, run_selected
from worker_node.serving.tokenizing import text_ids
from worker_node.settings import NodeSettings
from worker_node.tasks.embed.tokenizer import EmbeddingTokenizer

Vectors = npt.NDArray[np.float32]
Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed with one model; `model` None means the node's default embedding model.

    A text may be given as token ids of the model's own tokenizer, special tokens included, and is used unchanged.
    `input_type` (`query` or `document`) puts the model's own prompt before each text. `dimensions` None is as many as
    the model's vectors have.
    """

    context: RequestContext
    texts: tuple[str | tuple[int, ...], ...]
    model: str | None = None
    truncate: bool = False
    input_type: str | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingReply:
    """`vectors`: float32 (n, dimensions); comparable only to vectors of an equal `space`.

    `device_tokens` are those that the device computed, padding included, where the engine counts them;
    `computed_tokens` are those of the texts that it computed. `cached` says that all vectors (hit) or some (partial)
    were computed for an earlier request. The request waited for `loading_s` seconds for its model to be loaded.
    """

    route: Route
    vectors: Vectors
    space: str
    usage: Usage
    timing: Timing
    busy: Busy = NOT_MEASURED
    device_tokens: int | None = None
    computed_tokens: int = 0
    cached: Literal["hit", "partial"] | None = None
    loading_s: float = 0.0


async def embed(services: Services, request: EmbeddingRequest) -> EmbeddingReply:
    """Return the vectors of the request's texts, in order.

    Raises ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded, EngineUnavailable,
    ModelLoading, DeviceUnavailable.
    """
    context = request.context
    with services.tracing.operation("embeddings", {"npu.texts": len(request.texts)}) as operation:
        began = time.monotonic()
        model = await embedding_model(services.manager, request.model, context.deadline)
        with model.activity.working():
            reply = await _embed(services, model, request, operation, began)
        operation.answered(reply.usage, busy=reply.busy, cached=reply.cached)
        return reply


async def _embed(
    services: Services, model: EmbeddingModel, request: EmbeddingRequest, operation: Operation, began: float
) -> EmbeddingReply:
    context = request.context
    rows = await _tokenize(model, request)
    prepared = time.monotonic()
    operation.begin("route")
    space, usage = space_of(model, request.dimensions), Usage(sum(map(len, rows)))
    demand = Demand(
        model.id,
        model.placements,
        prompt_tokens=max(map(len, rows), default=0),
        token_count=usage.prompt_tokens,
        require=context.require_device,
    )
    selection = await select_placement(demand, context, units=len(rows))
    operation.routed(selection.route)
    if not rows:
        empty = np.empty((0, request.dimensions or model.dimensions), np.float32)
        return EmbeddingReply(selection.route, empty, space, usage, _timing_without_run(context))
    cache = services.parts.of(embedding_cache)
    # A vector that was computed for an earlier request proves nothing for this one.
    proof = Proof.of(selection.route, context, strict=services.require_proof)
    # Nor are vectors from before a recovery of the device used: it is announced a moment after what it aborted.
    kept_as = f"{model.space} {sum(placement.engine.recoveries for placement in model.placements)}"
    known = [None] * len(rows) if proof.required else cache.look_up(kept_as, selection.route.device, rows)
    missing = [index for index, vector in enumerate(known) if vector is None]
    _count_cached(services.telemetry, selection.route, hits=len(rows) - len(missing), misses=len(missing))
    if not missing:
        vectors = cut(np.stack([vector for vector in known if vector is not None]), request.dimensions)
        times = _timing_without_run(context)
        reply = EmbeddingReply(
            selection.route, vectors, space, usage, times, cached="hit", loading_s=selection.loading_s
        )
        count_embedding(services.telemetry, reply)
        return reply
    wanted = [rows[index] for index in missing]
    run = SingleRun(
        demand,
        context,
        row_job(wanted, context.deadline, interactive=context.interactive),
        RowResult,
        len(wanted),
        lambda limits: Work(sum(limits.computed_tokens(len(row)) for row in wanted)),
        began,
        prepared,
    )
    answer = await run_selected(services, run, selection, operation)
    result = answer.result
    computed = result.rows(len(wanted))
    cache.keep(kept_as, answer.route.device, wanted, computed)
    reply = EmbeddingReply(
        answer.route,
        cut(_merge(known, missing, computed), request.dimensions),
        space,
        usage,
        answer.timing,
        result.busy,
        result.device_tokens,
        computed_tokens=sum(map(len, wanted)),
        cached="partial" if len(missing) < len(rows) else None,
        loading_s=selection.loading_s,
    )
    count_embedding(services.telemetry, reply)
    return reply


async def _tokenize(model: EmbeddingModel, request: EmbeddingRequest) -> Rows:
    """The token ids of the texts, with the model's prompts. Raises as `embed`."""
    check_dimensions(model, request.dimensions)
    texts = with_prompt(model, request.texts, request.input_type)
    reject_if_full(model.placements, len(texts), request.context)
    return await model.tokenizer.encode(texts, truncate=request.truncate, deadline=request.context.deadline)


def _merge(known: Sequence[Vectors | None], missing: list[int], computed: Vectors) -> Vectors:
    """The vectors of all texts in order: `known` ones from the cache, those of `missing` indices as `computed`."""
    if len(missing) == len(known):
        return computed
    vectors = np.empty((len(known), computed.shape[1]), np.float32)
    vectors[missing] = computed
    for index, vector in enumerate(known):
        if vector is not None:
            vectors[index] = vector
    return vectors


def _timing_without_run(context: RequestContext) -> Timing:
    return Timing(queue=0.0, tokenize=0.0, inference=0.0, total=(time.monotonic() - context.arrived) * 1e3)


@dataclass(eq=False, slots=True)
class EmbeddingModel(ServedModel):
    """A served embedding model; `space` names its vector space.

    `prompts` and `matryoshka` as in `InstalledModel`.
    """

    tokenizer: EmbeddingTokenizer
    space: str
    dimensions: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    matryoshka: tuple[int, ...] = ()

    async def token_ids(self, text: str, *, special: bool, deadline: float) -> list[int]:
        return await text_ids(self.tokenizer.whole, text, self.tokenizer.limit, special=special, deadline=deadline)

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"dimensions": self.dimensions, "space": self.space}
        if self.prompts:
            facts["input_types"] = sorted(self.prompts)
        if self.matryoshka:
            facts["matryoshka"] = list(self.matryoshka)
        return facts


async def embedding_model(manager: ModelManager, name: str | None, deadline: float) -> EmbeddingModel:
    """The embedding model of that name, or the default one. Raises as `model_of`."""
    return await model_of(manager, ModelKind.EMBEDDING, EmbeddingModel, name, deadline)


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
    if not model.prompts:
        raise UnsupportedParameter(
            f"input_type: {model.id} declares no prompts, it embeds queries and documents alike; leave it out",
            param="input_type",
        )
    prompt = model.prompts[kind]
    prompted: list[str | tuple[int, ...]] = []
    for text in texts:
        if not isinstance(text, str):
            raise BadRequest("input_type: token ids get no prompt; send texts", param="input_type")
        prompted.append(prompt + text)
    return prompted


def check_dimensions(model: EmbeddingModel, dimensions: int | None) -> None:
    """Raises UnsupportedParameter for vectors of a size that the model does not declare."""
    if dimensions in (None, model.dimensions) or dimensions in model.matryoshka:
        return
    if model.matryoshka:
        sizes = ", ".join(map(str, (*model.matryoshka, model.dimensions)))
        raise UnsupportedParameter(f"dimensions: {model.id} can give {sizes}", param="dimensions")
    raise UnsupportedParameter(
        f"dimensions: the vectors of {model.id} have {model.dimensions} and it was not trained to be cut",
        param="dimensions",
    )


def space_of(model: EmbeddingModel, dimensions: int | None) -> str:
    """The vector space of vectors of that size: `SPACE-DIMENSIONS` where they are cut. The client expects this name."""
    return model.space if dimensions in (None, model.dimensions) else f"{model.space}-{dimensions}"


def cut(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first `dimensions` numbers of each row, at unit length again; a row of zeros stays one."""
    if dimensions is None or dimensions >= vectors.shape[1]:
        return vectors
    head = vectors[:, :dimensions]
    norms = np.linalg.norm(head, axis=1, keepdims=True)
    # Not in place: the rows may be the cache's, or the engine's bytes.
    return (head / np.where(norms > 0, norms, 1)).astype(np.float32, copy=False)


class EmbeddingCache:
    """The vectors of the `capacity` most recently used texts, so that embedding a text again costs nothing.

    A vector is only returned for the same tokens, vector space and device: the reply names the device that computed it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._vectors: OrderedDict[tuple[str, Device, tuple[int, ...]], Vectors] = OrderedDict()

    def look_up(self, space: str, device: Device, rows: Sequence[Sequence[int]]) -> list[Vectors | None]:
        """Return the vector of each row of token ids, or None where it is not kept."""
        found: list[Vectors | None] = []
        for row in rows if self.capacity else ():
            key = (space, device, tuple(row))
            found.append(self._vectors.get(key))
            if found[-1] is not None:
                self._vectors.move_to_end(key)
        return found or [None] * len(rows)

    def keep(self, space: str, device: Device, rows: Sequence[Sequence[int]], vectors: Vectors) -> None:
        """Store the vectors, one a row, and evict the least recently used ones."""
        # Of a request larger than the cache only the last rows, or its own first rows would be evicted by them.
        for row, vector in list(zip(rows, vectors, strict=True))[-self.capacity :] if self.capacity else ():
            self._vectors[space, device, tuple(row)] = vector.copy()
        while len(self._vectors) > self.capacity:
            self._vectors.popitem(last=False)

    async def close(self) -> None:
        self._vectors.clear()

    def __len__(self) -> int:
        return len(self._vectors)


def embedding_cache(settings: NodeSettings) -> EmbeddingCache:
    """The cache of a node."""
    return EmbeddingCache(settings.embedding_cache)


class EmbeddingMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"npu_node_{name}", text, ("model", "device"), registry=registry)

        self.texts = counter("embedded_texts", "Texts embedded")
        self.device_tokens = counter("embedding_device_tokens", "Tokens computed for embeddings, padding included")
        self.computed_tokens = counter(
            "embedding_computed_tokens", "Tokens of the texts computed for embeddings, without padding"
        )
        self.cache_hits = counter("embedding_cache_hits", "Texts whose vector was in the cache")
        self.cache_misses = counter("embedding_cache_misses", "Texts whose vector was not")


def declare_embedding_metrics(telemetry: Telemetry) -> None:
    """Create the metrics at start, so that they are exported from then on."""
    telemetry.made["texts"] = telemetry.own(EmbeddingMetrics).texts


def _count_cached(telemetry: Telemetry, route: Route, hits: int, misses: int) -> None:
    own = telemetry.own(EmbeddingMetrics)
    own.cache_hits.labels(route.model, route.device).inc(hits)
    own.cache_misses.labels(route.model, route.device).inc(misses)


def count_embedding(telemetry: Telemetry, reply: EmbeddingReply) -> None:
    telemetry.finished(reply.route, reply.usage, reply.timing, busy=reply.busy, ran=reply.cached != "hit")
    own, model, device = telemetry.own(EmbeddingMetrics), reply.route.model, reply.route.device
    own.texts.labels(model, device).inc(len(reply.vectors))
    if reply.device_tokens is not None:
        own.device_tokens.labels(model, device).inc(reply.device_tokens)
        own.computed_tokens.labels(model, device).inc(reply.computed_tokens)
