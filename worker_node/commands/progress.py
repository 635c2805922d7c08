"""Shows progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from worker_node.models.progress import Progress


class _Lines:
    """One line a stage."""

    def __init__(self, title: str) -> None:
        self._title = title

    def stage(self, name: str, total: int | None = None) -> None:
        size = f" ({total / 1e6:.0f} MB)" if total else ""
        print(f"{self._title}: {name}{size}", file=sys.stderr, flush=True)

    def update(self, done: int) -> None:
        """Lines do not move."""


@contextmanager
def progress_display(title: str) -> Iterator[Progress]:
    """A listener that shows the work on `title`, until the block ends."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    # rich takes longer to import than most commands take to run.
    from worker_node.commands.progress_bar import bar

    with bar(title) as progress:
        yield progress
