"""A run of a job from its request to its report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from backend_client._resilience.threads import in_daemon_thread
from backend_client.bulk import plan as plans
from backend_client.bulk.acceptance import rejection_check, verdict
from backend_client.bulk.columns import with_columns
from backend_client.bulk.driver import Driver, Progress, TooManyRejected
from backend_client.bulk.executors import Executor, LocalExecutor
from backend_client.bulk.finish import SUCCESS, finish
from backend_client.bulk.fragments import Fragment, listing_digest, of_shard
from backend_client.bulk.inputs import check_apart, list_inputs
from backend_client.bulk.job import BulkJob
from backend_client.bulk.quarantine import Quarantined, record, recorded
from backend_client.bulk.receipts import Receipt, read_receipts
from backend_client.bulk.report import BulkReport, ExitCode
from backend_client.bulk.request import BulkRequest
from backend_client.bulk.steps import reached
from backend_client.bulk.stores import Store, open_store, prove_exclusive
from backend_client.bulk.supervisor import History, Note
from backend_client.bulk.worker import Worker
from backend_client.errors import ConfigurationError
from backend_client.settings import ClientSettings

JOB, PLAN = "job.json", "_plan.json"
_NOTHING_LEFT = "the job was finished before: nothing was left to do"
_QUARANTINED = "{} fragments are quarantined: the same command tries them again"
OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _Begun:
    """A job that is described in its output, and what there is to do of it here."""

    job: BulkJob
    store: Store
    fragments: list[Fragment]
    mine: list[Fragment]
    todo: list[Fragment]
    receipts: dict[str, Receipt] = field(default_factory=dict)
    """Of what was done before."""


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
    ConfigurationError for a job that is not
    the one in the output, OutputFailed, and NPUError when no node serves it.
    """
    worker = executor or LocalExecutor(Worker(request, settings or ClientSettings.load()), request.window, note)
    began = time.monotonic()
    report = on_progress or (lambda _: None)
    try:
        store = await in_daemon_thread(lambda: open_store(request.out), "open output")
        finished = await in_daemon_thread(lambda: _looked_at(store, request.out), "look at output")
        job = await _described(request, store, worker)
        excluded: tuple[str, ...] = ()
        begun = await in_daemon_thread(lambda: _planned(request, job, store), "plan")
        progress = await in_daemon_thread(lambda: _progress(begun), "read receipts")
        report(progress)
        code = ExitCode.COMPLETE
        message = ""
        if begun.todo:
            if finished:  # Somebody removed files of it.
                await in_daemon_thread(lambda: prove_exclusive(store, request.out), "try output")
            # The nodes may have changed since the job was described; vectors of another space end the run here.
            excluded = (await worker.probe(job)).excluded
            await worker.begin(job)
            check = rejection_check(request.max_rejected, begun.mine)
            keep = _keeper(begun.store)
            driver = Driver(
                worker, progress, attempts=request.attempts, report=report, check=check, keep=keep, history=history
            )
            try:
                check(progress)
                for together in _apart(begun.todo, history):
                    await driver.run(together)
            except TooManyRejected as error:
                code, message = ExitCode.TOO_MANY_REJECTED, error.message
    finally:
        await worker.close()
    if code is ExitCode.COMPLETE and progress.quarantined:
        code = ExitCode.QUARANTINED
        message = _QUARANTINED.format(len(progress.quarantined))
    success = code is ExitCode.COMPLETE and await in_daemon_thread(lambda: _finished(begun), "finish")
    if success:
        # A job that is complete may still have more rejections than this run allows.
        code, message = verdict(request.max_rejected, progress)
        if finished and not begun.todo:
            message = message or _NOTHING_LEFT
    return BulkReport(
        exit_code=code,
        fragments=len(begun.mine),
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

    def read() -> BulkReport:
        store = open_store(request.out)
        data = store.read(JOB)
        stored = store.read(PLAN)
        if data is None or stored is None:
            raise ConfigurationError(f"{request.out} holds no job")
        job = BulkJob.load(data, f"{request.out}/{JOB}")
        begun = _split(request, job, store, plans.load(stored))
        progress = _progress(begun)
        success = store.read(SUCCESS) is not None
        quarantined = recorded(store, begun.todo)
        code, message = verdict(request.max_rejected, progress)
        if quarantined:
            code, message = ExitCode.QUARANTINED, _QUARANTINED.format(len(quarantined))
        elif begun.todo:
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

    return await in_daemon_thread(read, "read output")


def _looked_at(store: Store, out: str) -> bool:
    """Whether a run before this one has completed the job: then the output may be read-only. Others are tried."""
    finished = all(store.has(name) for name in (SUCCESS, JOB, PLAN))
    if not finished:
        prove_exclusive(store, out)
    with contextlib.suppress(OSError):
        store.sweep(every=False)
    return finished


async def _described(request: BulkRequest, store: Store, worker: Executor) -> BulkJob:
    """The job of the output: the one that is there, or else the one that is asked for."""
    check_apart(request.source, request.out)
    files = await in_daemon_thread(lambda: list_inputs(request.source), "list input")
    listing = listing_digest(files)
    data = await in_daemon_thread(lambda: store.read(JOB), "read job")
    if data is None:
        probe = await worker.probe(None)
        job = request.job(listing, model=probe.model, space=probe.space, dimensions=probe.dimensions)
        job = await in_daemon_thread(lambda: with_columns(job, files), "find columns")
        await in_daemon_thread(lambda: store.create(JOB, job.dump()), "describe job")
        # Of two drivers that begin at once, both take what the first has written.
        data = await in_daemon_thread(lambda: store.read(JOB), "read job")
    stored = BulkJob.load(data or b"", f"{request.out}/{JOB}")
    model = request.model or stored.model
    wanted = request.job(listing, model=model, space=stored.space, dimensions=stored.dimensions)
    # Columns are found once: the listing says that the files are the same.
    if differences := stored.differences(replace(wanted, schema=stored.schema, json_types=stored.json_types)):
        lines = "\n  ".join(differences)
        raise ConfigurationError(
            f"{request.out} holds another job:\n  {lines}\nrun it with what job.json says, or choose another output"
        )
    reached("job described")
    return stored


def _planned(request: BulkRequest, job: BulkJob, store: Store) -> _Begun:
    data = store.read(PLAN)
    if data is None:
        files = list_inputs(request.source)
        if listing_digest(files) != job.listing:
            raise ConfigurationError("the input changed while the job was planned: run it again")
        store.create(PLAN, plans.dump(plans.plan(files, job.rows_per_fragment)))
        data = store.read(PLAN) or b""
    reached("plan stored")
    return _split(request, job, store, plans.load(data))


def _split(request: BulkRequest, job: BulkJob, store: Store, fragments: list[Fragment]) -> _Begun:
    mine = of_shard(fragments, request.shard)
    present = store.names()
    return _Begun(job, store, fragments, mine, [part for part in mine if part.name not in present])


def _apart(fragments: list[Fragment], history: History | None) -> list[list[Fragment]]:
    """What is processed together: first all that is above suspicion, then one suspect after another."""
    suspects = history.suspects if history is not None else frozenset()
    return [
        [fragment for fragment in fragments if fragment.id not in suspects],
        *([fragment] for fragment in fragments if fragment.id in suspects),
    ]


def _progress(begun: _Begun) -> Progress:
    progress = Progress(len(begun.mine))
    todo = {fragment.id for fragment in begun.todo}
    done = [fragment for fragment in begun.mine if fragment.id not in todo]
    begun.receipts = read_receipts(begun.store, done)
    for receipt in begun.receipts.values():
        progress.add(receipt, before=True)
    # A writer may have died before its receipt: the fragment is done all the same.
    progress.done = len(done)
    return progress


def _finished(begun: _Begun) -> bool:
    """Whether the whole job is complete, with `_SUCCESS` written."""
    present = begun.store.names()
    if SUCCESS in present:
        return True
    if any(fragment.name not in present for fragment in begun.fragments):
        return False
    finish(begun.store, begun.fragments, begun.receipts)
    return True


def _keeper(store: Store) -> Callable[[Quarantined], Awaitable[None]]:
    async def keep(given_up: Quarantined) -> None:
        # Told at the end of the run in any case: this is for who asks how far the job is.
        with contextlib.suppress(OSError):
            await in_daemon_thread(lambda: record(store, given_up), "keep quarantined")

    return keep
