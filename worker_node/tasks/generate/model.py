"""A served generation model, how a request finds it, and what a request asks of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from worker_node.core.errors import NodeError
from worker_node.core.types import ModelKind, RequestContext
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import ServedModel
from worker_node.tasks.generate.chat import AnswerSchema, GivenForm, Image, Message, Rendering, TokenIds, ToolUse
from worker_node.tasks.generate.messages import Sampling
from worker_node.tasks.generate.options import GenerationOptions
from worker_node.tasks.generate.tokenization import ChatTokenizer

MAX_IMAGE_BYTES = 20_000_000
FORMATS = "PNG, JPEG, WebP or GIF"
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"})


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Images are scaled down before they go to the engine, as far as its preprocessor loses nothing by it.

    The shorter side then has at most `shortest` pixels (None: any), and an image at most `max_pixels`. `tokens` is an
    estimate of the tokens for a width and a height. `marks` stand for images in the model's own prompts, so that they
    cannot be part of a text.
    """

    tokens: Callable[[int, int], int]
    max_pixels: int
    shortest: int | None = None
    marks: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class GenerationModel(ServedModel):
    """A served generation model; an answer has at most `max_tokens_limit` tokens, a request `best_of_limit` answers.

    `sampling_defaults` are fields of `Sampling` for requests that leave them open; None for greedy ones. `images` is
    None for a model without vision.
    """

    tokenizer: ChatTokenizer
    max_tokens_limit: int = sys.maxsize
    best_of_limit: int = GenerationOptions().best_of_limit
    sampling_defaults: Mapping[str, Any] | None = None
    images: ImageRules | None = None

    def abilities(self) -> Sequence[str]:
        found = {
            "vision": self.images is not None,
            # The engine of a model with vision takes no grammars, which calls of tools are held to.
            "tools": self.tokenizer.takes_tools and self.images is None,
            "thinking": self.tokenizer.can_think,
        }
        return [ability for ability, has in found.items() if has]

    def template(self) -> str:
        return self.tokenizer.chat_template


async def generation_model(
    manager: ModelManager, name: str | None, deadline: float, *, seeing: bool = False
) -> GenerationModel:
    """The generation model of that name, or the default one; for requests with images (`seeing`) one with vision.

    Raises as `ModelManager.model_of`.
    """
    if name is None and seeing:
        for model in manager.models:
            if isinstance(model, GenerationModel) and model.images is not None:
                return model
    return await manager.model_of(ModelKind.GENERATION, GenerationModel, name, deadline)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue. Text and token ids are continued as they stand; messages go through the chat template.

    `sampling.max_new_tokens` None means as many as the placement allows. The answer has the form of `grammar`: EBNF, or
    what EBNF is compiled from; with tools it may be calls instead, and is if one is forced.
    `think` turns the reasoning of models that can do with and without it on or off; with `split_reasoning` it is
    separated from the answer. Prompt and answer together have at most `context_limit` tokens. With
    `drop_oldest` the oldest turns of a conversation that is too long are left out. `sent_as` says what the dialect
    calls the parts that errors name: `prompt`, `messages`, `max_new_tokens`, `n`, `response_format`.
    """

    context: RequestContext
    prompt: str | TokenIds | tuple[Message, ...]
    sampling: Sampling
    model: str | None = None
    tool_use: ToolUse | None = None
    grammar: str | AnswerSchema | GivenForm | None = None
    think: bool | None = None
    split_reasoning: bool = False
    context_limit: int | None = None
    rendering: Rendering = field(default_factory=Rendering)
    drop_oldest: bool = False
    sent_as: Mapping[str, str] = field(default_factory=dict, compare=False)

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Errors of this block name the fields that the caller sent."""
        try:
            yield
        except NodeError as error:
            error.param = self.sent_as.get(error.param, error.param) if error.param else None
            raise

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of a conversation in their order; none where the prompt is a text or token ids."""
        if not isinstance(self.prompt, tuple):
            return ()
        return tuple(image for turn in self.prompt for image in turn.images)
