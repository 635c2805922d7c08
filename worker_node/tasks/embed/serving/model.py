"""A served embedding model, and how a request finds the one that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker_node.core.types import ModelKind
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import ServedModel
from worker_node.serving.run import model_of
from worker_node.tasks.embed.serving.tokenizer import EmbeddingTokenizer


@dataclass(frozen=True, slots=True)
class EmbeddingModel(ServedModel):
    """A served embedding model; `space` names its vector space.

    `prompts` and `matryoshka` as in `InstalledModel`.
    """

    tokenizer: EmbeddingTokenizer
    space: str
    dimensions: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    matryoshka: tuple[int, ...] = ()

    def facts(self) -> Mapping[str, Any]:
        """See `ServedModel.facts`."""
        facts: dict[str, Any] = {"dimensions": self.dimensions, "space": self.space}
        if self.prompts:
            facts["input_types"] = sorted(self.prompts)
        if self.matryoshka:
            facts["matryoshka"] = list(self.matryoshka)
        return facts


async def embedding_model(manager: ModelManager, name: str | None, deadline: float) -> EmbeddingModel:
    """The embedding model of that name, or the default one. Raises as `model_of`."""
    return await model_of(manager, ModelKind.EMBEDDING, EmbeddingModel, name, deadline)
