"""Options of the generation engine of the NPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from worker_node.core.types import Device, ModelKind
from worker_node.settings.declaration import BlobOptions, Option, declare

MaxPromptLen = Annotated[
    int,
    Gt(0),
    Option(
        "tokens of the longest prompt, up to the model's context; memory grows with it",
        default="1024, or what the catalog says of the model",
    ),
]
MinResponseLen = Annotated[int, Gt(0), Option("tokens that the answer to the longest prompt has room for")]


@declare
@dataclass(frozen=True, kw_only=True)
class StatefulOptions(BlobOptions):
    """GenAI's properties for the NPU.

    `busy_counter` is the file of the NPU's busy counter, which the engine advances itself if `stand_in`.
    """

    title: ClassVar[str] = "Generation on the NPU: static shapes"
    task: ClassVar[str] = ModelKind.GENERATION
    devices: ClassVar[frozenset[Device]] = frozenset({Device.NPU})
    runner: ClassVar[str] = "worker_node.tasks.generate.stateful:StatefulRunner"

    engine: Literal["generation_stateful"] = "generation_stateful"
    max_prompt_len: MaxPromptLen = 1024
    min_response_len: MinResponseLen = 128
    prefill_hint: Annotated[
        Literal["DYNAMIC", "STATIC"] | None,
        Option("compute prompts in chunks (DYNAMIC), or all at once (STATIC)", default="OpenVINO's own"),
    ] = None
    generate_hint: Annotated[
        Literal["FAST_COMPILE", "BEST_PERF"] | None,
        Option("load faster, or generate faster", default="OpenVINO's own"),
    ] = None
    prefill_chunk_size: Annotated[
        Literal[16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192] | None,
        Option("tokens of one chunk of a prompt", default="OpenVINO's own; at most 256 on an emulated NPU"),
    ] = None
    busy_counter: str | None = None
    stand_in: bool = False
