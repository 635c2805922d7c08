"""Whether the disk holds what is to come, said before the download rather than after."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from worker_node.errors import DownloadFailed

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMEDY = "free some, or set NPU_NODE_MODEL_STORE to a directory on a larger disk"
# Kept free for everything else that runs on the disk.
_MARGIN = 64 << 20


def free_space(directory: Path) -> int:
    """Bytes that a user may still write to the disk of that directory, or of its first parent that exists."""
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
            where = f" ({cause.filename})" if cause.filename else ""
            return DownloadFailed(f"the disk is full{where}; {_REMEDY}, then pull again: it continues where it was")
        cause = cause.__cause__ or cause.__context__
    return None


def in_gigabytes(size: int) -> str:
    """A size in bytes as people read it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
