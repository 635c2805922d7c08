"""The models that this node serves, by every name they answer to."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from worker_node.domain import ModelKind
from worker_node.engines.base import EngineState
from worker_node.errors import BadRequest, ModelNotFound
from worker_node.models.catalog import Catalog, normalise_name
from worker_node.models.manifest import InstalledModel
from worker_node.serving.activity import Activity
from worker_node.serving.embedding_cache import EmbeddingCache
from worker_node.serving.placement import Placement
from worker_node.serving.schemas import SchemaCompiler
from worker_node.serving.tokenization import ChatTokenizer, EmbeddingTokenizer
from worker_node.telemetry import Telemetry
from worker_node.tracing.base import OFF, Tracing

DEFAULT_BEST_OF_LIMIT = 20


class ModelState(StrEnum):
    """What /health says of a model."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Served:
    installed: InstalledModel
    placements: Sequence[Placement]
    aliases: Sequence[str] = field(default=(), kw_only=True)
    activity: Activity = field(default_factory=Activity, kw_only=True, compare=False, repr=False)

    @property
    def id(self) -> str:
        """The model's name in replies."""
        return self.installed.id

    def state(self) -> ModelState:
        """`ready` and `degraded` models take requests: `degraded` ones on a placement other than the preferred one.

        `loading`: no engine serves, but one is being started, for the first time or again. `unloaded`: the preferred
        engine is loaded when a request needs it.
        """
        states = [placement.engine.status.state for placement in self.placements]
        if states[0] is EngineState.READY:
            return ModelState.READY
        if states[0] is EngineState.UNLOADED:
            return ModelState.READY if EngineState.READY in states else ModelState.UNLOADED
        if EngineState.READY in states:
            return ModelState.DEGRADED
        if EngineState.STARTING in states or EngineState.BACKING_OFF in states:
            return ModelState.LOADING
        # A placement that is loaded on demand takes requests, too.
        return ModelState.DEGRADED if EngineState.UNLOADED in states else ModelState.FAILED

    def serving(self) -> Placement | None:
        """The first placement that can serve now."""
        ready = (p for p in self.placements if p.engine.status.state is EngineState.READY)
        return next(ready, None)


@dataclass(frozen=True, slots=True)
class EmbeddingModel(_Served):
    """A served embedding model; `space` names its vector space."""

    tokenizer: EmbeddingTokenizer
    space: str
    dimensions: int


@dataclass(frozen=True, slots=True)
class GenerationModel(_Served):
    """A served generation model; an answer has at most `max_tokens_limit` tokens, a request `best_of_limit` answers."""

    tokenizer: ChatTokenizer
    max_tokens_limit: int = sys.maxsize
    best_of_limit: int = DEFAULT_BEST_OF_LIMIT


ServedModel = EmbeddingModel | GenerationModel


class Registry:
    """All served models; the first of each kind is the default.

    `require_proof`: requests that require the NPU are refused where its counter cannot be read.
    """

    def __init__(
        self,
        models: Iterable[ServedModel],
        catalog: Catalog,
        telemetry: Telemetry,
        cache: EmbeddingCache,
        tracing: Tracing = OFF,
        *,
        require_proof: bool = False,
        schemas: SchemaCompiler | None = None,
    ) -> None:
        self.models: tuple[ServedModel, ...] = ()
        self.telemetry = telemetry
        self.cache = cache
        self.tracing = tracing
        self.require_proof = require_proof
        self.schemas = schemas or SchemaCompiler()
        self._catalog = catalog
        self._by_id: dict[str, ServedModel] = {}
        self._by_alias: dict[str, ServedModel] = {}
        for model in models:
            self.add(model)

    def add(self, model: ServedModel) -> None:
        """Serve one more model."""
        self.models = (*self.models, model)
        self._by_id[normalise_name(model.id)] = model
        self._by_alias |= {normalise_name(alias): model for alias in model.aliases}

    def aliases(self, model: ServedModel) -> list[str]:
        """The names beside its id that `find` takes for the model, in lower case."""
        entry = self._catalog.find(model.id)
        known = entry.aliases if entry and normalise_name(entry.id) == normalise_name(model.id) else ()
        names = {normalise_name(name) for name in (*model.aliases, *known)} - self._by_id.keys()
        return sorted(name for name in names if self._by_alias.get(name, model) is model)

    def drop(self, model: ServedModel) -> None:
        """Serve a model no more."""
        self.models = tuple(other for other in self.models if other is not model)
        self._by_id.pop(normalise_name(model.id), None)
        self._by_alias = {alias: other for alias, other in self._by_alias.items() if other is not model}

    def embedding(self, name: str | None) -> EmbeddingModel:
        """The embedding model of that name, or the default one. Raises ModelNotFound, BadRequest (wrong kind)."""
        model = self._find(name, ModelKind.EMBEDDING)
        if not isinstance(model, EmbeddingModel):
            raise BadRequest(f"model {model.id} generates text and does not embed", param="model")
        return model

    def generation(self, name: str | None) -> GenerationModel:
        """The generation model of that name, or the default one. Raises ModelNotFound, BadRequest (wrong kind)."""
        model = self._find(name, ModelKind.GENERATION)
        if not isinstance(model, GenerationModel):
            raise BadRequest(f"model {model.id} embeds and does not generate text", param="model")
        return model

    def _find(self, name: str | None, kind: ModelKind) -> ServedModel:
        if name is None:
            for model in self.models:
                if model.installed.kind is kind:
                    return model
            known = ", ".join(model.id for model in self.models) or "none"
            raise ModelNotFound(f"this node serves no {kind} model; it serves: {known}", param="model")
        return self.find(name)

    def find(self, name: str) -> ServedModel:
        """The model of that id, configured alias or alias of the catalog, in this order. Raises ModelNotFound."""
        wanted = normalise_name(name)
        found = self._by_id.get(wanted) or self._by_alias.get(wanted)
        if found is None and (entry := self._catalog.find(name)) is not None:
            found = self._by_id.get(normalise_name(entry.id))
        if found is None:
            known = ", ".join(model.id for model in self.models) or "none"
            raise ModelNotFound(f"model {name[:100]!r} is not served here; served: {known}", param="model")
        return found
