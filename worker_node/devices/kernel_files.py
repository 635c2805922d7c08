"""Files of /proc and /sys, which are read again and again while the node has nothing to do."""

from __future__ import annotations


def read_kernel_file(path: str) -> bytes:
    """Return what the kernel says there. Raises OSError.

    Without a `Path`, a buffer and a decoder, which take longer than the kernel does.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.readall()
