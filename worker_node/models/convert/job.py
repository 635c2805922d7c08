"""What the parent asks of the process that converts, and what it hears back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from worker_node.models.canary import GenerationCanary
from worker_node.models.catalog import Quantization, SourceFormat
from worker_node.models.manifest import Fidelity, VectorFidelity


class ConversionJob(msgspec.Struct, frozen=True, kw_only=True):
    """Make a model directory in `target` from the files in `source`; both exist, `target` is empty.

    What is None is read from the files themselves. `origin` and `source_sha256` go into the manifest as they are.
    `pooling` (a `pooling.Pooling`) and `normalize` count for encoders whose files do not specify them.
    `prompts` and `matryoshka` are those of the catalog, for encoders whose files declare none.
    `movable` files may be moved out of `source` instead of copied.
    """

    source: str
    target: str
    scratch: str
    id: str
    format: SourceFormat
    licence: str
    origin: str
    source_sha256: dict[str, str]
    movable: bool = False
    kind: str | None = None
    family: str | None = None
    quantization: Quantization | None = None
    context_limit: int | None = None
    canary: GenerationCanary | None = None
    max_prompt_len: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    aliases: tuple[str, ...] = ()
    prompts: dict[str, str] = {}
    matryoshka: tuple[int, ...] = ()


class ConversionStage(msgspec.Struct, frozen=True, tag=True):
    """A stage of the conversion began."""

    name: str


class ConversionGivenUp(msgspec.Struct, frozen=True, tag=True):
    """The conversion was given up; `message` says why in words for the user."""

    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The target directory is complete, its manifest included."""


Message = ConversionStage | ConversionGivenUp | Done


# What a conversion found out about the model that it made.


@dataclass(frozen=True, slots=True)
class Converted:
    """The part of the manifest that only the files themselves can tell."""

    kind: str
    family: str
    quantization: str
    context_limit: int
    dimensions: int | None = None
    space: str | None = None
    fidelity: Fidelity | None = None
    canary: GenerationCanary | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    matryoshka: tuple[int, ...] = ()
    vector_fidelity: VectorFidelity | None = None
