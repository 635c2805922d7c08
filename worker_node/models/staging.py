"""How a model comes into the store whole or not at all.

Everything is made in a hidden directory on the store's own filesystem, flushed to disk, and renamed in one
step. A lock per model, which the kernel frees when its holder dies, keeps two pulls from doing the same work,
and tells a directory that is being made from one that was left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from worker_node.core.operating_system import lock, try_lock

_LOCKS = ".locks"
_DOWNLOADS = ".downloads"
# What nobody came back for within this time is removed.
_KEPT_S = 7 * 86400.0
_PARTIAL = re.compile(r"^\.partial-(?P<id>.+)-\d+$")


@contextmanager
def exclusive(root: Path, model_id: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of one model, waiting for it; `on_wait` is called first when another process holds it."""
    with _lock_file(root, model_id) as file:
        if not try_lock(file):
            if on_wait is not None:
                on_wait()
            lock(file)
        yield


def partial(root: Path, model_id: str) -> Path:
    """A new hidden directory to make the model in; the caller holds the model's lock."""
    directory = root / f".partial-{model_id}-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def downloads(root: Path, model_id: str) -> Path:
    """The hidden directory where files of one model arrive; it outlives a pull that fails, so the next continues."""
    return root / _DOWNLOADS / model_id


def remove_empty(directory: Path) -> None:
    """Remove a download directory in which nothing arrived, and its parent when it was the last."""
    for path in (directory, directory.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def publish(directory: Path, target: Path) -> None:
    """Flush a finished directory to disk and give it its name, in one step."""
    for path in sorted(directory.rglob("*"), reverse=True):
        _flush(path)
    _flush(directory)
    directory.rename(target)
    _flush(target.parent)


def discard(target: Path, model_id: str) -> None:
    """Remove a model: it vanishes in one step, and is deleted after; the caller holds the model's lock."""
    doomed = partial(target.parent, model_id)
    target.rename(doomed)
    shutil.rmtree(doomed)


def sweep(root: Path) -> list[Path]:
    """Remove what dead pulls left behind, and say what it was; what live ones are making is not touched.

    Downloads that broke off stay for a week, so that they can be continued.
    """
    removed = []
    for path in root.glob(f"{_DOWNLOADS}/*"):
        with _lock_file(root, path.name) as file:
            if try_lock(file) and _age(path) > _KEPT_S:
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    for path in root.glob(".partial-*"):
        if (match := _PARTIAL.match(path.name)) is None:
            continue
        with _lock_file(root, match["id"]) as file:
            if try_lock(file):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _age(directory: Path) -> float:
    """Seconds since anything in the directory was written."""
    times = [path.lstat().st_mtime for path in (directory, *directory.rglob("*"))]
    return time.time() - max(times)


def _lock_file(root: Path, model_id: str) -> IO[str]:
    # The file stays for good: removing it would let two processes lock two files of one name.
    (root / _LOCKS).mkdir(parents=True, exist_ok=True)
    return (root / _LOCKS / f"{model_id}.lock").open("a")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
