"""What `embed-dataset` and `generate-dataset` show: a bar while they run, and what came of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from backend_client.bulk import BulkReport, Progress
from backend_client.bulk.estimate import Estimate

_WIDTH, _LEAST_WIDTH = 24, 6
_EVERY_S = {"terminal": 0.2, "json": 5.0, "log": 30.0}


class Bar:
    """A line on standard error that is drawn anew, or every 30 s a new one where that is no terminal.

    In JSON, an object a line on standard output. `columns` are those of the terminal.
    """

    def __init__(
        self,
        *,
        as_json: bool,
        clock: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] | None = None,
    ) -> None:
        self._form = "json" if as_json else "terminal" if sys.stderr.isatty() else "log"
        self._every = _EVERY_S[self._form]
        self._clock = clock
        self._columns = columns or _terminal_columns
        self._began = clock()
        # Of a run that takes less, a log has the report only.
        self._last = self._began if self._form == "log" else float("-inf")
        self._before: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._form == "terminal" and self._before is not None:
            print(file=sys.stderr)

    def update(self, progress: Progress) -> None:
        """Draw it, unless it was drawn a moment ago."""
        now = self._clock()
        if self._before is None:
            self._before, self._began = progress.done, now
        last = self._form != "log" and progress.done == progress.fragments
        if now - self._last < self._every and not last:
            return
        self._last = now
        seconds = max(now - self._began, 1e-9)
        rate = progress.rows_now / seconds
        here = progress.done - self._before
        remaining = seconds / here * (progress.fragments - progress.done) if here else None
        if self._form == "json":
            shown = {name: getattr(progress, name) for name in ("fragments", "done", "running", "rows", "rejected")}
            more = {"failures": progress.failures, "lost": progress.lost, "quarantined": len(progress.quarantined)}
            times = {
                "rows_per_second": round(rate, 1),
                "seconds_left": None if remaining is None else round(remaining),
            }
            print(json.dumps({"event": "progress", **shown, **more, **times}), flush=True)
        elif self._form == "log":
            print(f"npu-client: {', '.join(_parts(progress, rate, remaining))}", file=sys.stderr, flush=True)
        else:
            line = bar_line(progress, rate, remaining, self._columns())
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)


def _terminal_columns() -> int:
    """The width of what standard error is: standard output may be a file, or another terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def bar_line(progress: Progress, rate: float, remaining: float | None, columns: int = 80) -> str:
    """The bar: `[####....] 12/40 fragments, 300 rows/s, 2:13 left, 1 rejected`.

    Shorter than `columns`, so that it can be drawn over: the bar gives way first, then the end of the line.
    """
    share = progress.done / progress.fragments if progress.fragments else 1.0
    text = ", ".join(_parts(progress, rate, remaining))
    width = min(_WIDTH, columns - len(text) - 4)
    bar = f"[{'#' * round(share * width)}{'.' * (width - round(share * width))}] " if width >= _LEAST_WIDTH else ""
    return f"{bar}{text}"[: columns - 1]


def _parts(progress: Progress, rate: float, remaining: float | None) -> list[str]:
    parts = [f"{progress.done}/{progress.fragments} fragments", f"{rate:.0f} rows/s"]
    parts.append(f"{clock_time(remaining)} left" if remaining is not None else f"{progress.running} under way")
    counts = {"rejected": progress.rejected, "failed": progress.failures, "quarantined": len(progress.quarantined)}
    return parts + [f"{count} {name}" for name, count in counts.items() if count]


def clock_time(seconds: float) -> str:
    """`1:02:03`, or `2:13`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_report(report: BulkReport, *, as_json: bool) -> None:
    """What came of a run, or how far a job is."""
    if as_json:
        print(json.dumps({"event": "report", **report.as_dict()}))
        return
    print(f"{report.done} of {report.fragments} fragments, {report.rows} rows, {report.rejected} rejected")
    for served, rows in report.served.items():
        print(f"{rows} rows by {served}")
    for node in report.excluded:
        print(f"excluded: {node} answers in another vector space")
    for fragment, reason in report.quarantined.items():
        print(f"quarantined: {fragment} ({reason})")
    if report.message:
        print(f"npu-client: {report.message}", file=sys.stderr)


def show_estimate(estimate: Estimate, *, as_json: bool) -> None:
    """What a job will take."""
    if as_json:
        print(json.dumps({"event": "estimate", **estimate.as_dict()}))
        return
    print(
        f"{estimate.files} files, {estimate.input_bytes / 1e6:.1f} MB, {estimate.fragments} fragments, "
        f"about {estimate.rows} rows"
    )
    print(
        f"{estimate.rows_per_second} rows/s measured on {estimate.sampled_rows} rows: "
        f"about {clock_time(estimate.seconds)}, {estimate.output_bytes / 1e6:.1f} MB of output"
    )
    print(f"cloud: at most {estimate.cloud_cost:f}")
    print(f"fragments of {estimate.suggested_rows_per_fragment} rows would take 2 to 3 minutes each")
    if estimate.sample_rejected:
        print(f"{estimate.sample_rejected} rows of the sample would be rejected")
