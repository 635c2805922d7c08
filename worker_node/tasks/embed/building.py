"""How embedding models are opened, and the canary that an engine must pass before it is ready."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker_node.core.errors import ConfigurationError
from worker_node.encoders.jobs import row_job
from worker_node.engines.process import Canary
from worker_node.models.directory import EmbeddingCanary, InstalledModel
from worker_node.serving.encoders import EncoderTask, Floats, known_answers_canary, known_that_fit
from worker_node.serving.task import EnginePlan
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.embed.service import EmbeddingModel
from worker_node.tasks.embed.tokenizer import EmbeddingTokenizer


def embedding_canary(rows: Sequence[Sequence[int]], vectors: Sequence[Sequence[float]], min_cosine: float) -> Canary:
    """The check that the engine's vectors of known texts, given as token ids, point where the CPU's did."""
    expected = np.asarray(vectors, np.float32)

    def fault(found: Floats) -> str | None:
        norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
        cosines = np.einsum("nd,nd->n", found, expected) / norms
        worst = float(np.nan_to_num(cosines, nan=-1.0).min())
        if worst < min_cosine:
            return f"cosine {worst:.4f} to the known vectors, at least {min_cosine} is right"
        return None

    return known_answers_canary(lambda deadline: row_job(rows, deadline), expected.shape, fault)


class _Embed(EncoderTask[EmbeddingModel]):
    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> EmbeddingModel:  # noqa: ARG002
        if installed.space is None or installed.dimensions is None:
            raise ConfigurationError(f"{installed.path}: an embedding model without dimensions or space; pull it again")
        tokenizer = EmbeddingTokenizer(installed.path, installed.context_limit)
        return EmbeddingModel(
            installed, tokenizer, installed.space, installed.dimensions, installed.prompts, installed.matryoshka
        )

    def canary(self, model: EmbeddingModel, wanted: ModelSettings, plan: EnginePlan) -> Canary | None:
        known = model.installed.canary
        if not isinstance(known, EmbeddingCanary):
            return None
        rows = model.tokenizer.rows(known.texts)
        fitting = known_that_fit(list(map(len, rows)), plan.prompt_limit, wanted)
        return embedding_canary([rows[i] for i in fitting], [known.vectors[i] for i in fitting], known.min_cosine)


EMBED = _Embed()
