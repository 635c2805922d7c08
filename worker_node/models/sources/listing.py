"""What a source holds, before anything of it is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file: `size` in bytes, and the hash that its source declares (hex): sha256 or that of the git object."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one version. `revision` is the commit; `licence` the declared one; `gguf` the hub's own summary of
    its GGUF files (architecture, context_length), where it has one; `architectures` those of its config.json."""

    name: str
    revision: str
    files: tuple[RemoteFile, ...]
    licence: str = "unknown"
    gguf: dict[str, Any] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()

    def find(self, path: str) -> RemoteFile | None:
        """The file of that path, or None."""
        return next((file for file in self.files if file.path == path), None)


def total_size(files: Sequence[RemoteFile]) -> int:
    """Bytes of some files together."""
    return sum(file.size for file in files)
