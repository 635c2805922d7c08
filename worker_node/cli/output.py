"""What commands print: tables, JSON, and progress (a bar on a terminal, plain lines elsewhere)."""

from __future__ import annotations

import logging
import os
import selectors
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from worker_node.models.progress import Progress

if TYPE_CHECKING:
    from rich import progress as rich_progress

TOY_MODEL, USEFUL_MODEL = "smollm2-135m-instruct", "phi-3.5-mini-npu"
"""The embedded chat model, and one of 3.8 billion parameters for the NPU or the CPU of a laptop with 16 GB."""
TOY_NOTE = f"{TOY_MODEL} is a toy of 135 million parameters; a useful model: npu-node pull {USEFUL_MODEL}"
_BAR_WIDTH = 16
_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# A pipe that takes a write has room for so many bytes.
_LOG_CHUNK = 4096


def documentation() -> Path | None:
    """Where the pages are that messages name, in a checkout and in an installation."""
    places = (
        Path(__file__).parents[2] / "docs",
        Path(sys.prefix, "share/doc/npu-node"),
        Path("/usr/share/doc/npu-node"),
    )
    return next((place for place in places if (place / "npu-machine.md").exists()), None)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width under a head; what no terminal may get, such as the commands of a name, is left out."""
    lines = [head, *([printable(text) for text in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def printable(text: str) -> str:
    """The text without characters that move a terminal's cursor or change its title."""
    return "".join(character for character in text if character.isprintable())


def say(text: str) -> None:
    """A line for the user on stderr, apart from what a program reads on stdout."""
    print(f"npu-node: {text}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    import orjson

    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def megabytes(size: int | None) -> str:
    """A size in bytes; a dash where it is not known."""
    if size is None:
        return "-"
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


def serving_placement(model: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The placement with which a model of GET /models is loaded; None where it is not."""
    if not model.get("loaded"):
        return None
    return next((placement for placement in model["devices"] if placement["state"] == "ready"), None)


@contextmanager
def progress_display(title: str) -> Iterator[Progress]:
    """Show the work on `title` on stderr until the block ends: on one line of any terminal, which then vanishes."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    # Takes longer to import than most commands take to run.
    from rich import progress
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    columns: tuple[progress.ProgressColumn, ...] = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[title]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=2)),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=3)),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[amount]}", table_column=Column(no_wrap=True, min_width=len("92.9 MB of 92.9 MB"))),
        TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as shown:
        yield _Bar(shown, title)


class _Lines(Progress):
    def __init__(self, title: str) -> None:
        self._title = title

    def stage(self, name: str, total: int | None = None) -> None:
        size = f" ({total / 1e6:.0f} MB)" if total else ""
        print(f"{self._title}: {name}{size}", file=sys.stderr, flush=True)


class _Bar(Progress):
    """One line: what is pulled, the stage, and for a download how far it is. A later stage has no bytes to count."""

    def __init__(self, progress: rich_progress.Progress, title: str) -> None:
        self._progress = progress
        self._title = title
        self._task = progress.add_task("starting", total=None, title=title, amount="")
        self._total: int | None = None

    def stage(self, name: str, total: int | None = None) -> None:
        self._total = total
        self._progress.reset(self._task, total=total, description=name, title=self._title, amount="")

    def update(self, done: int) -> None:
        from worker_node.models.disk import in_gigabytes

        if self._total is None:
            return
        # While a file is moved into place it may be counted twice.
        done = min(done, self._total)
        amount = f"{in_gigabytes(done)} of {in_gigabytes(self._total)}"
        self._progress.update(self._task, completed=done, amount=amount)


class LogHandler(logging.Handler):
    """Writes log lines to a stream, and drops those that nobody reads.

    A reader that stops (Ctrl-S, a pager, a stuck collector) must not stop the server: its event loop would wait for
    the write. Making one raises OSError for a stream that cannot be asked whether it takes a write.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._file = stream.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._file, selectors.EVENT_WRITE)
        self._selector.select(0.0)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        lines = f"{self.format(record)}\n"
        if self._dropped:
            lines = f"{self._dropped} lines of the log are lost, since stderr took no more\n{lines}"
        try:
            written = self._write(lines.encode(errors="backslashreplace"))
        except OSError:  # a full disk, or a reader that has ended
            written = False
        self._dropped = 0 if written else self._dropped + 1

    def _write(self, text: bytes) -> bool:
        while text:
            # A reader that was only slow gets its time; one that stopped is not waited for again.
            if not self._selector.select(0.0 if self._dropped else 0.02):
                return False
            text = text[os.write(self._file, text[:_LOG_CHUNK]) :]
        return True


def log_to_stderr(level: str) -> None:
    """Log to stderr as a server does."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    with suppress(OSError):  # a file, which always takes a write, and streams of Windows cannot be asked
        handler = LogHandler(sys.stderr)
    logging.basicConfig(level=level, format=_LOG_FORMAT, handlers=[handler])
