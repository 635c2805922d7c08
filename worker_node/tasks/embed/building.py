"""The canary of embedding engines, which must pass before a model is ready.

A device that computes garbage raises no error (reference: openvino #38100), so the engine must embed known texts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from worker_node.core.errors import ConfigurationError
from worker_node.engines.options import EngineOptions
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import JobEngine
from worker_node.models.directory import EmbeddingCanary, InstalledModel
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.encoders import EncoderTask, known_that_fit
from worker_node.serving.task import ModelParts, Shapes, no_canary
from worker_node.settings import ModelSettings
from worker_node.tasks.embed.messages import embed
from worker_node.tasks.embed.options import StaticOptions
from worker_node.tasks.embed.service import EmbeddingModel
from worker_node.tasks.embed.tokenizer import EmbeddingTokenizer


def embedding_canary(known: EmbeddingCanary, tokenizer: EmbeddingTokenizer) -> Canary:
    """Return the check that the engine's vectors of known texts point where the CPU's did."""
    expected = np.asarray(known.vectors, np.float32)

    async def check(engine: JobEngine) -> None:
        tokens = await tokenizer.encode(known.texts, truncate=False)
        output = await embed(engine, tokens, deadline=time.monotonic() + CANARY_TIMEOUT_S)
        if output.vectors.shape != expected.shape:
            raise CanaryFailed(f"vectors of shape {output.vectors.shape}, not {expected.shape}")
        norms = np.linalg.norm(output.vectors, axis=1) * np.linalg.norm(expected, axis=1)
        cosines = np.einsum("nd,nd->n", output.vectors, expected) / norms
        worst = float(np.nan_to_num(cosines, nan=-1.0).min())
        if worst < known.min_cosine:
            raise CanaryFailed(f"cosine {worst:.4f} to the known vectors, at least {known.min_cosine} is right")

    return check


# How embedding models are built, planned and admitted.


class _Embed(EncoderTask):
    def build(self, parts: ModelParts) -> EmbeddingModel:
        installed = parts.installed
        if installed.space is None or installed.dimensions is None:
            raise ConfigurationError(f"{installed.path}: an embedding model without dimensions or space; pull it again")
        tokenizer = EmbeddingTokenizer(installed.path, installed.context_limit)
        known = installed.canary

        def canary(limit: int) -> Canary:
            if not isinstance(known, EmbeddingCanary):
                return no_canary
            places = known_that_fit(tokenizer.lengths(known.texts), limit, parts.wanted)
            texts = tuple(known.texts[place] for place in places)
            vectors = tuple(known.vectors[place] for place in places)
            return embedding_canary(replace(known, texts=texts, vectors=vectors), tokenizer)

        return EmbeddingModel(
            installed,
            parts.place(canary),
            tokenizer,
            installed.space,
            installed.dimensions,
            installed.prompts,
            installed.matryoshka,
            aliases=parts.wanted.aliases,
            idle_unload_s=parts.wanted.idle_unload_s,
        )

    def admission(self, options: EngineOptions) -> AdmissionLimits:
        """See `ServedTask.admission`; packed texts are hardly padded."""
        limits = super().admission(options)
        packs = isinstance(options, StaticOptions) and options.npu_packing
        return replace(limits, sizes=()) if packs else limits

    def static_shapes(
        self, installed: InstalledModel, wanted: ModelSettings, values: dict[str, Any], *, emulated: bool
    ) -> Shapes:
        """See `ServedTask.static_shapes`."""
        if values.get("npu_packing") and values.get("npu_batch_size", 1) > 1:
            raise wanted.error("npu_packing", "a packed run has one row; leave out npu_batch_size")
        return super().static_shapes(installed, wanted, values, emulated=emulated)


EMBED = _Embed()
