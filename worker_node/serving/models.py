"""The kinds of served model, and how a request finds the one that it names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_node.domain import ModelKind
from worker_node.errors import BadRequest
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import ServedModel
from worker_node.options.generation import GenerationOptions
from worker_node.serving.embedding_tokenizer import EmbeddingTokenizer
from worker_node.serving.tokenization import ChatTokenizer


@dataclass(frozen=True, slots=True)
class EmbeddingModel(ServedModel):
    """A served embedding model; `space` names its vector space."""

    tokenizer: EmbeddingTokenizer
    space: str
    dimensions: int


@dataclass(frozen=True, slots=True)
class GenerationModel(ServedModel):
    """A served generation model; an answer has at most `max_tokens_limit` tokens, a request `best_of_limit` answers.

    `sampling_defaults` are fields of `Sampling` for requests that leave them open; None for greedy ones.
    """

    tokenizer: ChatTokenizer
    max_tokens_limit: int = sys.maxsize
    best_of_limit: int = GenerationOptions().best_of_limit
    sampling_defaults: Mapping[str, Any] | None = None


async def embedding_model(manager: ModelManager, name: str | None) -> EmbeddingModel:
    """The embedding model of that name, or the default one. Raises ModelNotFound, BadRequest (wrong kind)."""
    model = manager.default(ModelKind.EMBEDDING) if name is None else await manager.resolve(name)
    if not isinstance(model, EmbeddingModel):
        raise BadRequest(f"model {model.id} generates text and does not embed", param="model")
    return model


async def generation_model(manager: ModelManager, name: str | None) -> GenerationModel:
    """The generation model of that name, or the default one. Raises ModelNotFound, BadRequest (wrong kind)."""
    model = manager.default(ModelKind.GENERATION) if name is None else await manager.resolve(name)
    if not isinstance(model, GenerationModel):
        raise BadRequest(f"model {model.id} embeds and does not generate text", param="model")
    return model
