"""Options of engines that can load what was compiled ahead of time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from worker_node.options.declaration import EngineOptions, Option

# They say where something is, not what is compiled.
_NOT_COMPILED_IN = frozenset({"engine", "cache_dir", "blobs", "export_blobs", "busy_counter", "stand_in"})


@dataclass(frozen=True, kw_only=True)
class BlobOptions(EngineOptions):
    """The engine loads the blobs in `blobs`, or writes what it compiles to `export_blobs`, which only the node sets."""

    blobs: Annotated[
        str | None,
        Option(
            "directory that `npu-node compile` made; the model is loaded from there instead of being compiled, and is "
            "rejected if it was made for another model, driver, OpenVINO or other settings",
            default="compile when it is loaded",
        ),
    ] = None
    export_blobs: str | None = None

    def compiled_in(self) -> dict[str, Any]:
        """The options that a blob depends on."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_COMPILED_IN}
