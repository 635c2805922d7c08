"""Shows progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from worker_node.models.progress import Progress

if TYPE_CHECKING:
    from worker_node.commands.node_client import NodeClient


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
    with progress_displays([title]) as (progress,):
        yield progress


@contextmanager
def progress_displays(titles: Sequence[str]) -> Iterator[Sequence[Progress]]:
    """Listeners for pieces of work that are done at the same time, in the order of their titles."""
    if not sys.stderr.isatty():
        yield [_Lines(title) for title in titles]
        return
    # rich takes longer to import than most commands take to run.
    from worker_node.commands.progress_bar import bars

    with bars(titles) as shown:
        yield shown


def follow_pull(node: NodeClient, name: str, progress: Progress) -> None:
    """Have the node pull a model, and show how far it is. Raises NodeCallFailed."""
    stage: str | None = None
    with node.lines("/api/pull", {"model": name}) as lines:
        for line in lines:
            if line["status"] != stage:
                stage = line["status"]
                progress.stage(stage, line.get("total"))
            if line.get("completed"):
                progress.update(line["completed"])
