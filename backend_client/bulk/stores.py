"""Where a job's output goes. The one promise everything rests on: of several writers of a name, the first wins."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from backend_client.bulk.optional import file_system
from backend_client.errors import ConfigurationError, NPUError

R = TypeVar("R")

_TEMPORARY = ".tmp-"
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
        """Write a file, or replace it."""
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


def open_store(url: str, *, create: bool = True) -> Store:
    """The store of an output. Shows that it keeps the promise by trying.

    Raises ConfigurationError for a store that cannot refuse a second writer, or cannot be written.
    """
    system, path = file_system(url)
    local = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
    store: Store = LocalStore(Path(path)) if local in {"file", "local"} else ObjectStore(system, path.rstrip("/"))
    if not create:
        return store
    probe = f"_probe-{secrets.token_hex(8)}"
    try:
        exclusive = store.create(probe, b"1") and not store.create(probe, b"2")
        store.remove([probe])
    except (OSError, NotImplementedError, ValueError) as error:
        problem = f"{url} cannot be written: {error}"
    else:
        if exclusive:
            return store
        problem = f"{url} cannot refuse a second writer of a name, so rows could be written twice: choose another store"
    raise ConfigurationError(problem)


def _ended(pid: str) -> bool:
    """Whether that process of this machine has ended; one that nobody waited for is still listed, as a zombie."""
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[:1] == [b"Z"]


def read_many(store: Store, names: Iterable[str]) -> dict[str, bytes]:
    """The content of many small files; those that are gone are left out."""
    wanted = list(names)
    # A few files at a time: handing over each of 20,000 costs more than reading it.
    size = max(1, len(wanted) // (_READS_AT_ONCE * 4))
    parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
    with ThreadPoolExecutor(_READS_AT_ONCE, "reads") as pool:
        read = pool.map(lambda part: [(name, store.read(name)) for name in part], parts)
        return {name: data for part in read for name, data in part if data is not None}


def _twice(work: Callable[[], R]) -> R:
    """Do it again where the temporary file is gone: whoever completed the job meanwhile removed those of all others."""
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
            if every or (machine == self._machine and pid.isdigit() and _ended(pid)):
                path.unlink(missing_ok=True)

    def _written(self, name: str, data: bytes) -> Path:
        path = self.temporary("small")
        (self._root / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
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
            if pid.isdigit() and _ended(pid):
                path.unlink(missing_ok=True)
        _ = every
