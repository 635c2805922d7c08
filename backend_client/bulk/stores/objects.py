"""The store of a prefix in an object store."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from backend_client.bulk.stores.local import has_ended


class ObjectStore:
    """A prefix in an object store of fsspec: objects get their names by a put that is conditional on there being none.

    Data files are written to the temporary directory of this machine first, and sent as a whole.
    """

    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root

    def names(self, folder: str = "") -> set[str]:
        """See Store."""
        place = f"{self._root}/{folder}".rstrip("/")
        try:
            found = self._system.ls(place, detail=True, refresh=True)
        except FileNotFoundError:
            return set()
        files = {info["name"].rsplit("/", 1)[-1] for info in found if info["type"] == "file"}
        return {name for name in files if name and not name.startswith(".")}

    def has(self, name: str) -> bool:
        """See Store."""
        found: bool = self._system.exists(f"{self._root}/{name}")
        return found

    def create(self, name: str, data: bytes) -> bool:
        """See Store."""
        try:
            self._system.pipe_file(f"{self._root}/{name}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def put(self, name: str, data: bytes) -> None:
        """See Store."""
        self._system.pipe_file(f"{self._root}/{name}", data)

    def read(self, name: str) -> bytes | None:
        """See Store."""
        try:
            data: bytes = self._system.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        return data

    def temporary(self, fragment: str) -> Path:
        """See Store."""
        descriptor, path = tempfile.mkstemp(prefix=f"npu-bulk-{os.getpid()}-{fragment}-")
        os.close(descriptor)
        return Path(path)

    def commit(self, temporary: Path, name: str) -> bool:
        """See Store."""
        try:
            self._system.put_file(str(temporary), f"{self._root}/{name}", mode="create")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def open(self, name: str) -> Any:
        """See Store."""
        return self._system.open(f"{self._root}/{name}", "rb")

    def remove(self, names: Iterable[str]) -> None:
        """See Store."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._root}/{name}")

    def sweep(self, *, every: bool) -> None:
        """See Store."""
        for path in Path(tempfile.gettempdir()).glob("npu-bulk-*-*"):
            pid = path.name.split("-")[2]
            if pid.isdigit() and has_ended(pid):
                path.unlink(missing_ok=True)
        _ = every
