"""A progress bar for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from worker_node.models.sources.disk import in_gigabytes

_BAR_WIDTH = 16
# On narrower terminals name, and stage or amount, are all that is legible on a line.
_WIDE = 60


class _Bar:
    """One line: what is pulled, the stage, and for a download how far it is. A later stage has no bytes to count."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = title
        self._task: TaskID = progress.add_task("starting", total=None, title=title, amount="", brief="")
        self._total: int | None = None

    def stage(self, name: str, total: int | None = None) -> None:
        self._total = total
        self._progress.reset(self._task, total=total, description=name, title=self._title, amount="", brief=name)

    def update(self, done: int) -> None:
        if self._total is None:
            return
        # While a file is moved into place it may be counted twice.
        done = min(done, self._total)
        amount = f"{in_gigabytes(done)} of {in_gigabytes(self._total)}"
        self._progress.update(self._task, completed=done, amount=amount, brief=amount)


@contextmanager
def bars(titles: Sequence[str], console: Console | None = None) -> Iterator[list[_Bar]]:
    """A bar for each title on stderr, of one line whatever the terminal's width; they vanish when the work is done."""
    shown = console or Console(stderr=True)
    columns: tuple[ProgressColumn, ...] = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[title]}", table_column=_one_line(ratio=2)),
        TextColumn("{task.description}", table_column=_one_line(ratio=3)),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[amount]}", table_column=Column(no_wrap=True, min_width=len("92.9 MB of 92.9 MB"))),
        TimeElapsedColumn(),
    )
    if shown.width < _WIDE:
        brief = TextColumn("{task.fields[brief]}", table_column=_one_line(ratio=1))
        columns = (SpinnerColumn(), TextColumn("[bold]{task.fields[title]}", table_column=_one_line(ratio=1)), brief)
    with Progress(*columns, console=shown, transient=True, expand=True) as progress:
        yield [_Bar(progress, title) for title in titles]


def _one_line(ratio: int) -> Column:
    return Column(no_wrap=True, overflow="ellipsis", ratio=ratio)
