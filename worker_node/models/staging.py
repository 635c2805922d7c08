"""How a model comes into the store whole or not at all.

Everything is made in a hidden directory on the store's own filesystem, flushed to disk, and renamed in one
step. A lock per model, which the kernel frees when its holder dies, keeps two pulls from doing the same work,
and tells a directory that is being made from one that was left behind.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCKS = ".locks"
_PARTIAL = re.compile(r"^\.partial-(?P<id>.+)-\d+$")


@contextmanager
def exclusive(root: Path, model_id: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of one model; yields False at once when `wait` is False and another holds it."""
    (root / _LOCKS).mkdir(parents=True, exist_ok=True)
    # The lock file stays for good: removing it would let two processes lock two files of one name.
    with (root / _LOCKS / f"{model_id}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def partial(root: Path, model_id: str) -> Path:
    """A new hidden directory to make the model in; the caller holds the model's lock."""
    directory = root / f".partial-{model_id}-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


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
    """Remove what dead pulls left behind, and say what it was; what live ones are making is not touched."""
    removed = []
    for path in root.glob(".partial-*"):
        if (match := _PARTIAL.match(path.name)) is None:
            continue
        with exclusive(root, match["id"], wait=False) as locked:
            if locked:
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
