"""A run of a job from its request to its report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable

from backend_client.bulk.acceptance import rejection_check, verdict
from backend_client.bulk.driver import Driver, Progress, TooManyRejected
from backend_client.bulk.executors import Executor
from backend_client.bulk.finish import SUCCESS
from backend_client.bulk.fragments import Fragment
from backend_client.bulk.opened import OpenedJob, describe, open_job, read_job, was_completed
from backend_client.bulk.quarantine import Quarantined, record, recorded
from backend_client.bulk.report import BulkReport, ExitCode
from backend_client.bulk.request import BulkRequest
from backend_client.bulk.stores import Store, open_store, prove_exclusive
from backend_client.bulk.supervisor import History, Note
from backend_client.bulk.window import shared_by_small, whole
from backend_client.bulk.worker import Worker
from backend_client.lifetime import in_daemon_thread
from backend_client.settings import ClientSettings

_NOTHING_LEFT = "the job was finished before: nothing was left to do"
_QUARANTINED = "{} fragments are quarantined: the same command tries them again"
OnProgress = Callable[[Progress], None]


async def run_job(
    request: BulkRequest,
    settings: ClientSettings | None = None,
    *,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
    history: History | None = None,
    note: Note | None = None,
) -> BulkReport:
    """Do what is left of a job; interrupted anywhere, the same call continues it.

    Works in this event loop, or with the executor, which it closes. `history` and `note` are a supervisor's. Raises
    ConfigurationError for another job than the one in the output, OutputFailed, and NPUError when no node serves it.
    """
    worker = executor or Worker(request, settings or ClientSettings.load(), note)
    began = time.monotonic()
    report = on_progress or (lambda _: None)
    excluded: tuple[str, ...] = ()
    code, message = ExitCode.COMPLETE, ""
    try:
        store = await in_daemon_thread(lambda: open_store(request.out), "open output")
        finished = await in_daemon_thread(lambda: _check_output(store, request.out), "look at output")
        described = await describe(request, store, worker)
        job = await in_daemon_thread(lambda: open_job(request, described, store), "plan")
        progress = await in_daemon_thread(job.progress, "read receipts")
        report(progress)
        if job.todo:
            if finished:  # Somebody removed files of it.
                await in_daemon_thread(lambda: prove_exclusive(store, request.out), "try output")
            # The nodes may have changed since the job was described; vectors of another space end the run here.
            excluded = (await worker.probe(described)).excluded
            await worker.begin(described)
            try:
                await _drive(request, job, progress, worker, report, history)
            except TooManyRejected as error:
                code, message = ExitCode.TOO_MANY_REJECTED, error.message
    finally:
        await worker.close()
    if code is ExitCode.COMPLETE and progress.quarantined:
        code, message = ExitCode.QUARANTINED, _QUARANTINED.format(len(progress.quarantined))
    success = code is ExitCode.COMPLETE and await in_daemon_thread(job.finish_if_complete, "finish")
    if success:
        # A job that is complete may still have more rejections than this run allows.
        code, message = verdict(request.max_rejected, progress)
        if finished and not job.todo:
            message = message or _NOTHING_LEFT
    return BulkReport(
        exit_code=code,
        fragments=len(job.mine),
        done=progress.done,
        rows=progress.rows,
        rejected=progress.rejected,
        rows_now=progress.rows_now,
        seconds=round(time.monotonic() - began, 3),
        quarantined={part.fragment.id: str(part) for part in progress.quarantined},
        served=dict(progress.served.most_common()),
        excluded=excluded,
        failures=progress.failures,
        lost=progress.lost,
        success=success,
        message=message,
    )


async def status(request: BulkRequest) -> BulkReport:
    """How far a job is, from its output alone: the exit code is that of a run which ended so, or INCOMPLETE.

    Raises ConfigurationError when there is no job.
    """
    return await in_daemon_thread(lambda: _read_status(request), "read output")


def _read_status(request: BulkRequest) -> BulkReport:
    store = open_store(request.out)
    job = read_job(request, store)
    progress = job.progress()
    success = store.read(SUCCESS) is not None
    quarantined = recorded(store, job.todo)
    code, message = verdict(request.max_rejected, progress)
    if quarantined:
        code, message = ExitCode.QUARANTINED, _QUARANTINED.format(len(quarantined))
    elif job.todo:
        code, message = ExitCode.INCOMPLETE, "the job is not complete: the same command without --status continues"
    return BulkReport(
        exit_code=code,
        quarantined=quarantined,
        message=message,
        fragments=progress.fragments,
        done=progress.done,
        rows=progress.rows,
        rejected=progress.rejected,
        success=success,
    )


def _check_output(store: Store, out: str) -> bool:
    """Return whether an earlier run has completed the job: its output may be read-only. Other outputs are tried."""
    finished = was_completed(store)
    if not finished:
        prove_exclusive(store, out)
    with contextlib.suppress(OSError):
        store.sweep(every=False)
    return finished


async def _drive(
    request: BulkRequest,
    job: OpenedJob,
    progress: Progress,
    worker: Executor,
    report: OnProgress,
    history: History | None,
) -> None:
    """Process the fragments that are left. Raises TooManyRejected, also for the rejections of earlier runs."""
    check = rejection_check(request.max_rejected, job.mine)
    keep = _keeper(job.store)
    # An actor of a cluster works on one fragment at a time: that several share a slot would gain nothing there.
    parts = shared_by_small(request.rows) if isinstance(worker, Worker) else whole
    driver = Driver(
        worker,
        progress,
        attempts=request.attempts,
        report=report,
        check=check,
        keep=keep,
        history=history,
        parts=parts,
    )
    check(progress)
    for together in _apart(job.todo, history):
        await driver.run(together)


def _apart(fragments: list[Fragment], history: History | None) -> list[list[Fragment]]:
    """The fragments in groups that are processed together: first all that are not suspects, then each suspect alone."""
    suspects = history.suspects if history is not None else frozenset()
    return [
        [fragment for fragment in fragments if fragment.id not in suspects],
        *([fragment] for fragment in fragments if fragment.id in suspects),
    ]


def _keeper(store: Store) -> Callable[[Quarantined], Awaitable[None]]:
    async def keep(given_up: Quarantined) -> None:
        # The report names it in any case: the record is for `status`, so a failure to write it is no error.
        with contextlib.suppress(OSError):
            await in_daemon_thread(lambda: record(store, given_up), "keep quarantined")

    return keep
