"""Where a job's output goes. The one promise everything rests on: of several writers of a name, the first wins."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from backend_client.errors import INSTALL_EXTRA, ConfigurationError, NPUError

_TEMPORARY = ".tmp-"


class OutputFailed(NPUError):
    """The output cannot be written: the disk is full or read-only, or its store refuses. The run stops."""


def need(module: str, extra: str = "bulk") -> Any:
    """A module of an extra. Raises ConfigurationError when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
    raise ConfigurationError(f"{missing} is missing: {INSTALL_EXTRA.format(extra)}")


def file_system(url: str) -> tuple[Any, str]:
    """The file system for a path or URL, and the path in it. Raises ConfigurationError for an unknown scheme."""
    fsspec = need("fsspec")
    try:
        found, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        problem = str(error)
    else:
        # Listings are cached by default: a run must see what other runs commit.
        found.use_listings_cache = False
        found.invalidate_cache()
        return found, path
    raise ConfigurationError(f"{url.partition('://')[0]} cannot be opened: {problem}")


def open_store(url: str) -> Store:
    """The store of an output. Writes nothing."""
    system, path = file_system(url)
    local = "file" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)
    return LocalStore(system, path) if local else Store(system, path.rstrip("/"))


class Store:
    """A prefix in an object store of fsspec. Methods block, and raise OSError.

    An object gets its name by a put that is conditional on there being none. Data files are written on this machine
    first, and sent as a whole.
    """

    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root

    def names(self, folder: str = "") -> set[str]:
        """The names in a folder without hidden ones; none where there is no such folder."""
        try:
            found = self._system.ls(self._path(folder), detail=False, refresh=True)
        except FileNotFoundError:
            return set()
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in found}
        return {name for name in names if not name.startswith(".")}

    def has(self, name: str) -> bool:
        found: bool = self._system.exists(self._path(name))
        return found

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one of that name. Returns whether this call did."""
        try:
            self._system.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def count(self, name: str) -> None:
        """Make a file one byte longer."""
        self._system.pipe_file(self._path(name), (self.read(name) or b"") + b"x")

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        try:
            data: bytes = self._system.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return data

    def temporary(self, fragment: str) -> Path:
        """Where a data file is written before it has its name."""
        descriptor, path = tempfile.mkstemp(prefix=f"npu-bulk-{fragment}-")
        os.close(descriptor)
        return Path(path)

    def commit(self, temporary: Path, name: str) -> bool:
        """Give a complete file its name unless another has it, and remove the temporary. Returns whether it has."""
        try:
            self._system.put_file(str(temporary), self._path(name), mode="create")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def open(self, name: str) -> Any:
        return self._system.open(self._path(name), "rb")

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(self._path(name))

    def sweep(self) -> None:
        """Remove temporary data files from the output."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


class LocalStore(Store):
    """A directory, on this machine or shared by several: files get their names by `link`, which never replaces."""

    def create(self, name: str, data: bytes) -> bool:
        # Another prefix than that of data files: a process that completes the job must not sweep it away.
        path = self._hidden(f".small-{secrets.token_hex(8)}")
        Path(self._path(name)).parent.mkdir(parents=True, exist_ok=True)
        try:
            path.write_bytes(data)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return self.commit(path, name)

    def count(self, name: str) -> None:
        # In place: a hidden file of a process that dies here would stay.
        path = Path(self._path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b"x")

    def temporary(self, fragment: str) -> Path:
        return self._hidden(f"{_TEMPORARY}{secrets.token_hex(8)}-{fragment}")

    def commit(self, temporary: Path, name: str) -> bool:
        final = Path(self._path(name))
        try:
            _sync(temporary)
            os.link(temporary, final)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # The process that found all fragments committed removed what others were still writing.
            if final.exists():
                return False
            raise
        finally:
            temporary.unlink(missing_ok=True)
        if os.name != "nt":  # there a directory cannot be opened, and NTFS keeps its names in its journal
            _sync(final.parent)
        return True

    def sweep(self) -> None:
        for path in Path(self._root).glob(f"{_TEMPORARY}*"):
            path.unlink(missing_ok=True)

    def _hidden(self, name: str) -> Path:
        root = Path(self._root)
        root.mkdir(parents=True, exist_ok=True)
        return root / name


def _sync(path: Path) -> None:
    # A file must be open for writing to be synced on Windows, a directory for reading on Linux.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prove_exclusive(store: Store, url: str) -> None:
    """Raise ConfigurationError for a store that cannot be written or does not refuse a second writer."""
    probe = f"_probe-{secrets.token_hex(8)}"
    try:
        exclusive = store.create(probe, b"1") and not store.create(probe, b"2")
        store.remove([probe])
    except (OSError, NotImplementedError, ValueError) as error:
        problem = f"{url} cannot be written: {error}"
    else:
        if exclusive:
            return
        problem = f"{url} cannot refuse a second writer of a name, so rows could be written twice: choose another store"
    raise ConfigurationError(problem)
