"""What a conversion found out about the model that it made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from worker_node.models.canary import GenerationCanary
from worker_node.models.manifest import Fidelity, VectorFidelity


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
