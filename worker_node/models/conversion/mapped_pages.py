"""Keeps files that are mapped out of a process's resident memory: weights of gigabytes that are read once or twice."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

_PERIOD_S = 0.1
_mapped: list[weakref.ref[mmap.mmap]] = []


def note_mapped(array: NDArray[Any]) -> None:
    """Have the pages of this `numpy.memmap` dropped by `pages_dropped` for as long as it is mapped."""
    if isinstance(array.base, mmap.mmap):
        _mapped.append(weakref.ref(array.base))


@contextmanager
def pages_dropped() -> Iterator[None]:
    """While the block runs, drop the pages of what was noted ten times a second.

    They stay in the kernel's cache, written ones too, which gives them back when they are read again, or to others who
    need the memory.
    """
    ended = threading.Event()

    def drop() -> None:
        while not ended.wait(_PERIOD_S):
            drop_pages()

    thread = threading.Thread(target=drop, name="mapped pages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def drop_pages() -> None:
    """Drop them once."""
    for reference in _mapped:
        mapping = reference()
        # Its owner may not unmap it as long as it is held here.
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)
