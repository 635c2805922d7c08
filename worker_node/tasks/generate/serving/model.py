"""A served generation model, and how a request finds the one that it names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker_node.core.types import ModelKind
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import ServedModel
from worker_node.serving.run import model_of
from worker_node.tasks.generate.model_options import GenerationOptions
from worker_node.tasks.generate.serving.picture_rules import PictureRules
from worker_node.tasks.generate.serving.tokenization import ChatTokenizer


@dataclass(frozen=True, slots=True)
class GenerationModel(ServedModel):
    """A served generation model; an answer has at most `max_tokens_limit` tokens, a request `best_of_limit` answers.

    `sampling_defaults` are fields of `Sampling` for requests that leave them open; None for greedy ones. `pictures` is
    None for a model without vision.
    """

    tokenizer: ChatTokenizer
    max_tokens_limit: int = sys.maxsize
    best_of_limit: int = GenerationOptions().best_of_limit
    sampling_defaults: Mapping[str, Any] | None = None
    pictures: PictureRules | None = None

    def abilities(self) -> Sequence[str]:
        """See `ServedModel.abilities`."""
        found = {
            "vision": self.pictures is not None,
            # The engine of a model with vision takes no grammars, which calls of tools are held to.
            "tools": self.tokenizer.takes_tools and self.pictures is None,
            "thinking": self.tokenizer.can_think,
        }
        return [ability for ability, has in found.items() if has]

    def template(self) -> str:
        """See `ServedModel.template`."""
        return self.tokenizer.chat_template


async def generation_model(
    manager: ModelManager, name: str | None, deadline: float, *, seeing: bool = False
) -> GenerationModel:
    """The generation model of that name, or the default one; for requests with pictures (`seeing`) one with vision.

    Raises as `model_of`.
    """
    if name is None and seeing:
        for model in manager.models:
            if isinstance(model, GenerationModel) and model.pictures is not None:
                return model
    return await model_of(manager, ModelKind.GENERATION, GenerationModel, name, deadline)
