"""Options of generation models that the node itself uses, whichever engine runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from worker_node.core.types import ModelKind
from worker_node.settings.declaration import Option, Options, declare


@declare
@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Options):
    """What requests may ask for, and what applies when they ask for nothing."""

    title: ClassVar[str] = "Generation"
    task: ClassVar[str] = ModelKind.GENERATION

    max_tokens_limit: Annotated[
        int | None, Gt(0), Option("tokens that a request may ask for in an answer", default="what the context holds")
    ] = None
    sampling_defaults: Annotated[
        Literal["model", "greedy"] | None,
        Option(
            "where a request leaves sampling open: the model's generation_config.json (Ollama's own defaults in its "
            "dialect), or greedy",
            default="the node's",
        ),
    ] = None
    best_of_limit: Annotated[int, Ge(1), Option("answers that a request may ask for (n)")] = 20
