"""What a job asks of the place where its output goes, and what it reads there in bulk."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from backend_client.errors import NPUError

_READS_AT_ONCE = 32


class OutputFailed(NPUError):
    """The output cannot be written: the disk is full or read-only, or its store refuses. The run stops."""


class Store(Protocol):
    """A directory of files that are complete once they have a name. Methods block. All raise OSError."""

    def names(self, folder: str = "") -> set[str]:
        """The files of a folder, without hidden ones; none where there is no such folder."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one of that name. Returns whether this call made it."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it. For what can be made again: a loss of power may leave it empty."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        ...

    def temporary(self, fragment: str) -> Path:
        """Where the data file of a fragment can be written before it has its name."""
        ...

    def commit(self, temporary: Path, name: str) -> bool:
        """Give a complete file its name unless another has it, and remove the temporary one.

        Returns whether this one has the name.
        """
        ...

    def open(self, name: str) -> Any:
        """A file for reading."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that nothing refers to."""
        ...

    def sweep(self, *, every: bool) -> None:
        """Remove temporary files of processes of this machine that have ended; with `every`, all of them."""
        ...


def read_many(store: Store, names: Iterable[str]) -> dict[str, bytes]:
    """The content of many small files; those that are gone are left out."""
    wanted = list(names)
    # A few files at a time: handing over each of 20,000 costs more than reading it.
    size = max(1, len(wanted) // (_READS_AT_ONCE * 4))
    parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
    with ThreadPoolExecutor(_READS_AT_ONCE, "reads") as pool:
        read = pool.map(lambda part: [(name, store.read(name)) for name in part], parts)
        return {name: data for part in read for name, data in part if data is not None}
