"""How embedding models are built, planned and admitted."""

from __future__ import annotations

from typing import Any

from worker_node.domain import Device
from worker_node.errors import ConfigurationError
from worker_node.hosting.life import Canary
from worker_node.models.canary import EmbeddingCanary
from worker_node.models.manifest import InstalledModel
from worker_node.options.declaration import EngineOptions
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.scheduling.backlog import Capacity
from worker_node.serving.embedding_tokenizer import EmbeddingTokenizer
from worker_node.serving.models import EmbeddingModel
from worker_node.serving.shapes import bucket_shapes
from worker_node.serving.task import EnginePlan, Footprint, ModelParts, ServedTask, Shapes, no_canary
from worker_node.settings import ModelSettings
from worker_node.tasks.embed.dynamic_options import EmbeddingOptions
from worker_node.tasks.embed.serving.canary import embedding_canary
from worker_node.tasks.embed.static_options import StaticOptions

MAX_OUTSTANDING_TEXTS = 8192
# Of the engine on a CPU, where the settings leave it open.
BATCH_TOKENS = 512


class _Embed(ServedTask):
    def build(self, parts: ModelParts) -> EmbeddingModel:
        installed = parts.installed
        if installed.space is None or installed.dimensions is None:
            raise ConfigurationError(f"{installed.path}: an embedding model without dimensions or space; pull it again")
        tokenizer = EmbeddingTokenizer(installed.path, installed.context_limit)
        canary: Canary = no_canary
        if isinstance(installed.canary, EmbeddingCanary):
            canary = embedding_canary(installed.canary, tokenizer)
        return EmbeddingModel(
            installed,
            parts.place(canary),
            tokenizer,
            installed.space,
            installed.dimensions,
            aliases=parts.wanted.aliases,
            idle_unload_s=parts.wanted.idle_unload_s,
        )

    def admission(self, options: EngineOptions) -> AdmissionLimits:
        """Units are texts."""
        match options:
            case StaticOptions(npu_buckets=buckets, npu_batch_size=rows):
                return AdmissionLimits(
                    MAX_OUTSTANDING_TEXTS, capacity=Capacity(step_tokens=buckets[-1] * rows), sizes=buckets
                )
            case EmbeddingOptions(max_batch_tokens=tokens):
                return AdmissionLimits(
                    MAX_OUTSTANDING_TEXTS, parallel=16, capacity=Capacity(step_tokens=tokens or BATCH_TOKENS)
                )
        raise TypeError(f"{type(options).__name__} is no embedding engine's")

    def static_shapes(
        self,
        installed: InstalledModel,
        wanted: ModelSettings,
        values: dict[str, Any],
        *,
        emulated: bool,  # noqa: ARG002
    ) -> Shapes:
        return bucket_shapes(installed.context_limit, wanted, values)

    def footprint(self, _installed: InstalledModel, plan: EnginePlan) -> Footprint:
        if isinstance(plan.options, StaticOptions):
            # Each static shape is compiled with a copy of the weights.
            return Footprint(weights=float(len(plan.options.npu_buckets)))
        return Footprint()

    def keeps_compiled(self, device: Device, *, emulated: bool) -> bool:
        """On the emulated NPU compiling takes half a second, and keeping it a copy of all weights for each bucket."""
        return device is not Device.CPU and not emulated


EMBED = _Embed()
