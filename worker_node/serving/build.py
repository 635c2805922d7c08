"""From settings and installed models to served models: which engine runs each placement, with what options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_node.domain import Device, ModelKind
from worker_node.engines.base import EngineSpec
from worker_node.errors import ConfigurationError
from worker_node.hosting.life import Canary, HostingLimits
from worker_node.hosting.supervisor import SupervisedEngine
from worker_node.models.canary import EmbeddingCanary, GenerationCanary
from worker_node.models.manifest import InstalledModel
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.serving.canary import embedding_canary, generation_canary
from worker_node.serving.placement import Placement
from worker_node.serving.registry import EmbeddingModel, GenerationModel, ServedModel
from worker_node.serving.tokenization import ChatTokenizer, EmbeddingTokenizer
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings

_OPTIONS: dict[ModelKind, frozenset[str]] = {
    ModelKind.EMBEDDING: frozenset({"precision", "streams", "max_batch_tokens"}),
    ModelKind.GENERATION: frozenset(
        {
            "max_num_batched_tokens",
            "max_num_seqs",
            "cache_size_gb",
            "dynamic_split_fuse",
            "enable_prefix_caching",
        }
    ),
}
# What is counted is texts for embedding and requests for generation.
_ADMISSION: dict[ModelKind, AdmissionLimits] = {
    ModelKind.EMBEDDING: AdmissionLimits(max_outstanding=8192, parallel=64),
    ModelKind.GENERATION: AdmissionLimits(max_outstanding=256, parallel=64),
}


def build_model(installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> ServedModel:
    """Return the model with its tokenizer and its engines, none started. Raises ConfigurationError."""
    _refuse_foreign_options(installed, wanted)
    if installed.kind is ModelKind.EMBEDDING:
        return _embedding_model(installed, wanted, settings)
    chat = ChatTokenizer(installed.path, installed.context_limit)
    canary: Canary = _no_canary
    if isinstance(installed.canary, GenerationCanary):
        canary = generation_canary(installed.canary, chat)
    return GenerationModel(installed, _placements(installed, wanted, settings, canary), chat)


def _embedding_model(installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> EmbeddingModel:
    if installed.space is None or installed.dimensions is None:
        raise ConfigurationError(f"{installed.path}: an embedding model without dimensions or space; pull it again")
    tokenizer = EmbeddingTokenizer(installed.path, installed.context_limit)
    canary: Canary = _no_canary
    if isinstance(installed.canary, EmbeddingCanary):
        canary = embedding_canary(installed.canary, tokenizer)
    return EmbeddingModel(
        installed,
        _placements(installed, wanted, settings, canary),
        tokenizer,
        installed.space,
        installed.dimensions,
    )


async def _no_canary(_engine: object) -> None:
    """A model that was brought without known answers is ready as soon as it is loaded."""


def _placements(
    installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings, canary: Canary
) -> tuple[Placement, ...]:
    limits = _ADMISSION[installed.kind]
    if wanted.max_outstanding is not None:
        limits = AdmissionLimits(wanted.max_outstanding, limits.parallel)
    hosting = HostingLimits(load_timeout_s=settings.load_timeout_s, watchdog_s=settings.watchdog_s)
    placements = []
    for place in wanted.placements:
        spec = EngineSpec(
            model_id=installed.id,
            kind=installed.kind,
            path=str(installed.path),
            device=place.device,
            runner=_runner(installed, place.device),
            options=_options(installed, wanted, place, settings.compile_cache),
        )
        placements.append(
            Placement(
                device=place.device,
                engine=SupervisedEngine(spec, canary, hosting),
                admission=Admission(f"{installed.id} on {place.device}", limits),
                prompt_limit=installed.context_limit,
                total_limit=installed.context_limit,
            )
        )
    return tuple(placements)


def _runner(installed: InstalledModel, device: Device) -> str:
    if device is Device.NPU:
        raise ConfigurationError(f"{installed.id}: this version has no engine for the NPU; place it on GPU or CPU")
    return "embedding" if installed.kind is ModelKind.EMBEDDING else "generation_continuous"


def _options(
    installed: InstalledModel, wanted: ModelSettings, place: PlacementSettings, compile_cache: Path | None
) -> dict[str, object]:
    options: dict[str, Any] = {
        name: value for name in _OPTIONS[installed.kind] if (value := getattr(wanted, name)) is not None
    }
    if place.plugin_config:
        options["plugin_config"] = place.plugin_config
    if compile_cache is not None:
        options["cache_dir"] = str(compile_cache / installed.id)
    return options


def _refuse_foreign_options(installed: InstalledModel, wanted: ModelSettings) -> None:
    every = frozenset[str]().union(*_OPTIONS.values())
    foreign = sorted(name for name in every - _OPTIONS[installed.kind] if getattr(wanted, name) is not None)
    if foreign:
        raise ConfigurationError(
            f"model {wanted.name}: {', '.join(foreign)} cannot be used by an engine for {installed.kind}; remove it"
        )
