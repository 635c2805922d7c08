"""A progress bar for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def stage(self, name: str, total: int | None = None) -> None:
        self._progress.reset(self._task, total=total, description=name)

    def update(self, done: int) -> None:
        self._progress.update(self._task, completed=done)


@contextmanager
def bar(title: str) -> Iterator[_Bar]:
    """A bar on stderr that vanishes when the work is done."""
    columns = (
        SpinnerColumn(),
        TextColumn(f"[bold]{title}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, progress.add_task("starting", total=None))
