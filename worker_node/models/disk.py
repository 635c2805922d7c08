"""Whether the disk holds what is to come, said before the download rather than after."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import psutil

from worker_node.core.errors import DownloadFailed

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_CHOICE = "NPU_NODE_MODEL_STORE (or --model-store)"
_REMEDY = f"free some, or set {_CHOICE} to a directory on a larger disk"
_ELSEWHERE = f"set {_CHOICE} to a directory that can be written, and NPU_NODE_COMPILE_CACHE likewise"
# Kept free for everything else that runs on the disk.
_MARGIN = 64 << 20


def free_space(directory: Path) -> int:
    """Bytes free for a user on the disk of that directory or its first parent that exists. Raises OSError."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def require_space(directory: Path, needed: int, what: str) -> None:
    """Raise DownloadFailed, with both figures and what to set, unless `needed` bytes are free."""
    available = free_space(directory)
    if needed + _MARGIN > available:
        raise DownloadFailed(
            f"not enough disk space for {what}: it needs {in_gigabytes(needed + _MARGIN)}, "
            f"{in_gigabytes(available)} are free in {directory}; {_REMEDY}"
        )


def disk_full(error: BaseException) -> DownloadFailed | None:
    """The error to raise when `error`, or what it came from, says that the disk is full; else None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return DownloadFailed(f"{storage_problem(cause)}; then pull again: it continues where it was")
        cause = cause.__cause__ or cause.__context__
    return None


def storage_problem(error: OSError) -> str | None:
    """What keeps files from being written or read, and what to set, where the error is about that; else None."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in _FULL:
        return f"the disk is full{where}; {_REMEDY}"
    if error.errno == errno.EROFS:
        return f"the file system is read-only{where}; {_ELSEWHERE}"
    if error.errno in _FORBIDDEN and error.filename:
        user, denied = psutil.Process().username(), (error.strerror or "denied").lower()
        return f"user {user} may not use {error.filename} ({denied}); {_ELSEWHERE}"
    return None


def in_gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
