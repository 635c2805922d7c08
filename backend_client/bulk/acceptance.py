"""How many rejected rows a job accepts: checked while it runs, and judged when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backend_client.bulk.driver import Progress, TooManyRejected
from backend_client.bulk.fragments import Fragment
from backend_client.bulk.report import ExitCode


def rejection_check(share: float, fragments: Sequence[Fragment]) -> Callable[[Progress], None]:
    """Raises TooManyRejected once more rows are rejected than the share of all; their number may be an estimate.

    Files that are damaged or end early do not end a run: they are counted when all others are done.
    """
    known = sum(fragment.rows for fragment in fragments if fragment.rows is not None)
    unknown = sum(fragment.rows is None for fragment in fragments)

    def check(progress: Progress) -> None:
        rejected = progress.rejected - progress.incomplete
        seen = progress.rows + rejected
        # Of files without a row count, as many rows in each fragment as there were on average so far.
        expected = known if not unknown else max(seen, seen * len(fragments) / max(1, progress.done))
        if rejected > share * expected:
            raise TooManyRejected(_message(progress, share))

    return check


def verdict(share: float, progress: Progress) -> tuple[ExitCode, str]:
    """How a complete job ends, and why."""
    if progress.incomplete and share < 1:
        return ExitCode.TOO_MANY_REJECTED, (
            f"{progress.incomplete} files are damaged or end early, and nobody knows how many rows they lack: see "
            "rejected/; all else is done, --max-rejected 1 accepts it"
        )
    if progress.rejected > share * (progress.rows + progress.rejected):
        return ExitCode.TOO_MANY_REJECTED, _message(progress, share)
    return ExitCode.COMPLETE, ""


def _message(progress: Progress, share: float) -> str:
    return (
        f"{progress.rejected} rows are rejected, more than {share:.3%} of them: see rejected/; "
        "increase --max-rejected and run the same command to continue"
    )
