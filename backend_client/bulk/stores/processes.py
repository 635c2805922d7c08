"""Processes of this machine: the temporary files of one that has ended are nobody's."""

from __future__ import annotations

from pathlib import Path


def has_ended(pid: str) -> bool:
    """Whether that process of this machine has ended; one that nobody waited for is still listed, as a zombie."""
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[:1] == [b"Z"]
