"""The store of a directory. Temporary files of a process that has ended are removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar


def has_ended(pid: str) -> bool:
    """Whether that process of this machine has ended; one that nobody waited for is still listed, as a zombie."""
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[:1] == [b"Z"]


# The store of a directory.

R = TypeVar("R")

_TEMPORARY = ".tmp-"


def _twice(work: Callable[[], R]) -> R:
    """Retry where the temporary file is gone: a process that completed the job meanwhile removed it."""
    try:
        return work()
    except FileNotFoundError:
        return work()


class LocalStore:
    """A directory, on this machine or shared by several: files get their names by `link`, which never replaces."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._machine = socket.gethostname().replace("-", "_")

    def names(self, folder: str = "") -> set[str]:
        """See Store."""
        found = set()
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_file():
                    found.add(entry.name)
        return found

    def has(self, name: str) -> bool:
        """See Store."""
        return (self._root / name).exists()

    def create(self, name: str, data: bytes) -> bool:
        """See Store."""
        return _twice(lambda: self.commit(self._written(name, data), name))

    def put(self, name: str, data: bytes) -> None:
        """See Store."""
        _twice(lambda: self._written(name, data).replace(self._root / name))

    def read(self, name: str) -> bytes | None:
        """See Store."""
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def temporary(self, fragment: str) -> Path:
        """See Store."""
        self._root.mkdir(parents=True, exist_ok=True)
        return self._root / f"{_TEMPORARY}{self._machine}-{os.getpid()}-{secrets.token_hex(4)}-{fragment}"

    def commit(self, temporary: Path, name: str) -> bool:
        """See Store."""
        final = self._root / name
        try:
            descriptor = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.link(temporary, final)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # Who found all fragments committed removed what others were still writing.
            if final.exists():
                return False
            raise
        finally:
            temporary.unlink(missing_ok=True)
        self._sync(final.parent)
        return True

    def open(self, name: str) -> Any:
        """See Store."""
        return (self._root / name).open("rb")

    def remove(self, names: Iterable[str]) -> None:
        """See Store."""
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def sweep(self, *, every: bool) -> None:
        """See Store."""
        for path in self._root.glob(f"{_TEMPORARY}*"):
            machine, pid, *_ = path.name.removeprefix(_TEMPORARY).split("-")
            if every or (machine == self._machine and pid.isdigit() and has_ended(pid)):
                path.unlink(missing_ok=True)

    def _written(self, name: str, data: bytes) -> Path:
        path = self.temporary("small")
        (self._root / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as file:
                file.write(data)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    def _sync(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
