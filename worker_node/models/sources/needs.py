"""What a conversion takes, estimated from the size of the weights; checked before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker_node.core.errors import ConversionFailed
from worker_node.devices.memory import available_memory
from worker_node.models.catalog import SourceFormat
from worker_node.models.sources.disk import in_gigabytes, require_space

_GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of memory at the peak, and bytes of disk beside the published files."""

    memory: int
    disk: int


def conversion_needs(source_format: SourceFormat, size: int, *, movable: bool) -> Needs:
    """Estimate for weights of `size` bytes; `movable` files are moved where they need no change.

    The factors are upper bounds of what was measured (docs/performance.md).
    """
    match source_format:
        case SourceFormat.GGUF:
            # Disk: GenAI's graph of the file, and the result.
            return Needs(memory=3 * size + _GIGABYTE, disk=int(2.5 * size))
        case SourceFormat.SAFETENSORS | SourceFormat.TASK:
            # Half-precision weights become twice as large: encoders are kept in float32.
            return Needs(memory=4 * size + _GIGABYTE // 2, disk=int(2.2 * size))
        case _:
            return Needs(memory=_GIGABYTE // 2, disk=0 if movable else size)


def require_resources(source_format: SourceFormat, size: int, room: Path, what: str, *, movable: bool) -> None:
    """Raise DownloadFailed (disk) or ConversionFailed (memory), with both figures, when a conversion does not fit."""
    needs = conversion_needs(source_format, size, movable=movable)
    require_space(room, needs.disk, f"the conversion of {what}")
    available = available_memory()
    if available is not None and needs.memory > available:
        raise ConversionFailed(
            f"not enough memory to convert {what}: it takes up to {in_gigabytes(needs.memory)}, "
            f"{in_gigabytes(available)} are available; stop other programs, choose a smaller file, "
            "or convert it on a larger machine and copy the directory"
        )
