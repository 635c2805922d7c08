"""Options of encoders whose directories are served in place: what their files leave open (`models.in_place`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from worker_node.domain import ModelKind
from worker_node.options.declaration import Option, Options, declare


@declare
@dataclass(frozen=True, kw_only=True)
class VectorOptions(Options):
    """How token vectors become the vector of a text."""

    title: ClassVar[str] = "Embedding: a directory (`path`) whose files do not specify it"
    task: ClassVar[str] = ModelKind.EMBEDDING

    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        Option(
            "the mean of the token vectors, the first one, or the last one (Qwen3-Embedding)",
            default="as the directory's modules.json says",
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        Option("scale vectors to length 1", default="as modules.json says; true with pooling", also=("normalise",)),
    ] = None
