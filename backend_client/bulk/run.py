"""A run of a job, from its request to its report.

Begin with `run_job`. `Driver` hands fragments to an executor, counts attempts, and stops when too much is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from backend_client.bulk import output
from backend_client.bulk.answers import Unanswered, cancelled
from backend_client.bulk.inputs import Fragment, InputChanged, InputFile, check_apart, list_inputs
from backend_client.bulk.job import BulkJob, BulkRequest, load_job
from backend_client.bulk.output import SUCCESS, BulkReport, ExitCode, Progress, Receipt
from backend_client.bulk.readers import survey
from backend_client.bulk.stores import OutputFailed, Store, open_store, prove_exclusive
from backend_client.bulk.worker import Executor, Worker, WorkerLost
from backend_client.errors import AuthenticationFailed, ConfigurationError, NPUError, NPUUnavailableError
from backend_client.lifetime import in_daemon_thread
from backend_client.settings import ClientSettings

log = logging.getLogger(__name__)

# These would meet every fragment alike: trying again, or going on, helps nobody.
_FATAL = (AuthenticationFailed, ConfigurationError, NPUUnavailableError, OutputFailed)
# Before a fragment that failed is tried again; doubled each time.
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 30.0
_JOB = "_job.json"


class TooManyRejected(NPUError):
    """More rows were rejected than the job allows."""


class Driver:
    """One run over the fragments that have no file yet.

    `attempts`: a fragment that failed so often is quarantined. `deaths`: fragments with which processes died are
    done last and, where a death ends this process, alone: one that kills holds up no other. `check` raises
    TooManyRejected.
    """

    def __init__(
        self,
        executor: Executor,
        job: BulkJob,
        progress: Progress,
        *,
        attempts: int,
        report: Callable[[Progress], None],
        check: Callable[[], None],
        deaths: Mapping[str, int] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._executor = executor
        self._job = job
        self._progress = progress
        self._attempts = attempts
        self._report = report
        self._check = check
        self._sleep = sleep
        self._deaths = deaths or {}
        self._failed = Counter[str]()

    async def run(self, fragments: Iterable[Fragment]) -> None:
        """Process all of them. Raises the first error that would meet every fragment."""
        waiting = deque(sorted(fragments, key=lambda fragment: self._deaths.get(fragment.id, 0)))
        # With each fragment, how many were committed when it began.
        running: dict[asyncio.Task[Receipt], tuple[Fragment, int]] = {}
        changed = asyncio.create_task(self._executor.changed())
        try:
            while waiting or running:
                while waiting:
                    parts = [waiting[0], *(part for part, _ in running.values())]
                    alone = not self._executor.isolated and any(part.id in self._deaths for part in parts)
                    if len(running) >= (min(1, self._executor.slots) if alone else self._executor.slots):
                        break
                    fragment = waiting.popleft()
                    running[asyncio.create_task(self._attempt(fragment))] = fragment, self._progress.done
                self._progress.running = len(running)
                if changed.done():
                    changed.result()
                    changed = asyncio.create_task(self._executor.changed())
                done, _ = await asyncio.wait([*running, changed], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task in done]:
                    fragment, done_before = running.pop(task)
                    if self._settle(fragment, task, done_before):
                        waiting.append(fragment)
                self._progress.lost = self._executor.lost
                self._report(self._progress)
        finally:
            await cancelled([*running, changed])
            self._progress.running = 0

    async def _attempt(self, fragment: Fragment) -> Receipt:
        failed = self._failed[fragment.id]
        if failed:
            await self._sleep(min(_FIRST_PAUSE_S * 2 ** (failed - 1), _LAST_PAUSE_S))
        return await self._executor.submit(self._job, fragment)

    def _settle(self, fragment: Fragment, task: asyncio.Task[Receipt], done_before: int) -> bool:
        """Record the outcome of an attempt. Returns whether to try again."""
        error = task.exception()
        if error is None:
            self._progress.add(task.result())
            self._check()
            return False
        if isinstance(error, InputChanged):
            raise ConfigurationError(str(error))
        if isinstance(error, NPUUnavailableError) and self._progress.done > done_before:
            # Others were served meanwhile: on Ray the nodes of one machine are down, or those of all since just now.
            return True
        if isinstance(error, _FATAL) or not isinstance(error, Exception):
            raise error
        self._progress.failures += 1
        # A request that was not answered for long enough has had its attempts: those of the whole fragment cost more.
        self._failed[fragment.id] += self._attempts if isinstance(error, Unanswered) else 1
        if self._failed[fragment.id] < self._attempts:
            return True
        place = f"{fragment.file.url} {fragment.start}-{fragment.stop}"
        known = error.message if isinstance(error, NPUError) else f"{type(error).__name__}: {error}"
        reason = "its worker died" if isinstance(error, WorkerLost) else known
        self._progress.quarantined[fragment.id] = f"{place}: {reason[:300]}"
        return False


# A job as its output describes it, and how many rejected rows it accepts.


@dataclass(slots=True)
class OpenedJob:
    """The job of an output: all `fragments`, those of this shard without a file (`todo`), and the shard's `rows`."""

    store: Store
    job: BulkJob
    fragments: list[Fragment]
    todo: list[Fragment]
    rows: int
    progress: Progress

    def check(self, share: float) -> None:
        """Raise TooManyRejected once more rows are rejected than the share of all.

        Damaged files do not end a run: they are counted when all others are done.
        """
        rejected = self.progress.rejected - self.progress.incomplete
        if rejected > share * self.rows:
            raise TooManyRejected(_message(self.progress, share))

    def finish_if_complete(self) -> bool:
        """Write `_SUCCESS` if every fragment has a file; return whether that is so."""
        present = self.store.names()
        if SUCCESS in present:
            return True
        if any(fragment.name not in present for fragment in self.fragments):
            return False
        output.finish(self.store, self.fragments, self.progress.receipts)
        return True


def verdict(share: float, progress: Progress) -> tuple[ExitCode, str]:
    """How a complete job ends, and why."""
    if progress.incomplete and share < 1:
        return ExitCode.TOO_MANY_REJECTED, (
            f"{progress.incomplete} files are damaged or end early, and the number of rows that they lack is unknown: "
            "see _rejected/; all else is done, --max-rejected 1 accepts it"
        )
    if progress.rejected > share * (progress.rows + progress.rejected):
        return ExitCode.TOO_MANY_REJECTED, _message(progress, share)
    return ExitCode.COMPLETE, ""


def _message(progress: Progress, share: float) -> str:
    return (
        f"{progress.rejected} rows are rejected, more than {share:.3%} of them: see _rejected/; "
        "increase --max-rejected and run the same command to continue"
    )


# A run of a job from its request to its report.

OnProgress = Callable[[Progress], None]


async def run_job(
    request: BulkRequest,
    settings: ClientSettings | None = None,
    *,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
) -> BulkReport:
    """Do what is left of a job; interrupted anywhere, the same call continues it.

    Works in this event loop, or with the executor, which it closes. Raises ConfigurationError for another job than the
    one in the output, OutputFailed, and NPUError when no node serves it.
    """
    worker = executor or Worker(request, settings or ClientSettings.load())
    began = time.monotonic()
    report = on_progress or (lambda _: None)
    code, message, excluded = ExitCode.COMPLETE, "", None
    try:
        store, files, data, finished = await in_daemon_thread(lambda: _look(request), "look at output")
        if data is None:
            probe = await worker.probe(None)
            wanted = request.job(model=probe.model, space=probe.space, dimensions=probe.dimensions)
            data, won = await in_daemon_thread(lambda: _describe(store, wanted, files), "describe job")
            excluded = probe.excluded if won else None
        job = await in_daemon_thread(lambda: _opened(request, store, data or b"", files), "open job")
        progress = job.progress
        report(progress)
        if job.todo:
            if finished:  # Somebody removed files of it.
                await in_daemon_thread(lambda: prove_exclusive(store, request.out), "try output")
            if excluded is None:
                # The nodes may have changed since the job was described; vectors of another space end the run here.
                excluded = (await worker.probe(job.job)).excluded
            try:
                await _drive(request, job, worker, report)
            except TooManyRejected as error:
                code, message = ExitCode.TOO_MANY_REJECTED, error.message
    finally:
        await worker.close()
    if progress.quarantined and code is ExitCode.COMPLETE:
        code = ExitCode.QUARANTINED
        message = f"{len(progress.quarantined)} fragments are quarantined: the same command tries them again"
    success = code is ExitCode.COMPLETE and await in_daemon_thread(job.finish_if_complete, "finish")
    if success:
        # A job that is complete may still have more rejections than this run allows.
        code, message = verdict(request.max_rejected, progress)
        if finished and not job.todo:
            message = message or "the job was finished before: nothing was left to do"
    seconds = round(time.monotonic() - began, 3)
    return progress.report(code, message, success=success, excluded=excluded or (), seconds=seconds)


def _look(request: BulkRequest) -> tuple[Store, list[InputFile], bytes | None, bool]:
    """The output, the files of the input, the description of the job, and whether the job is finished.

    Raises ConfigurationError for an output that cannot be written, unless it is finished, or has data of another job.
    """
    check_apart(request.source, request.out)
    store = open_store(request.out)
    finished = store.has(SUCCESS) and store.has(_JOB)
    if not finished:
        prove_exclusive(store, request.out)
    files = list_inputs(request.source)
    # Listed first: another driver may describe the job meanwhile, and writes only after that.
    others = sorted(name for name in store.names() if name == SUCCESS or name.endswith(".parquet"))
    data = store.read(_JOB)
    if data is None and others:
        raise ConfigurationError(
            f"{request.out} has no {_JOB}, but holds {others[0]}, which would be taken for data of this job: choose "
            "another output, or empty it"
        )
    return store, files, data, finished


def _describe(store: Store, job: BulkJob, files: Sequence[InputFile]) -> tuple[bytes | None, bool]:
    """Describe the job in its output. Of two drivers that start at once, both get what was written first."""
    won = store.create(_JOB, BulkJob.dump(*survey(job, files)))
    return store.read(_JOB), won


def _opened(request: BulkRequest, store: Store, data: bytes, files: Sequence[InputFile] | None) -> OpenedJob:
    """The job of the output. Raises ConfigurationError for another than the request asks for, with the files."""
    job, fragments = load_job(data, f"{request.out}/{_JOB}")
    if files is not None:
        asked = request.job(model=request.model or job.model, space=job.space, dimensions=job.dimensions)
        # Columns are determined only once: the equal files show that they are the same.
        differences = job.differences(replace(asked, schema=job.schema, json_types=job.json_types))
        known = {fragment.file for fragment in fragments}
        if changed := sorted(file.url for file in known.symmetric_difference(files)):
            differences.append(f"files: {changed[0]} is new, gone or changed since _job.json was written")
        if differences:
            lines = "\n  ".join(differences)
            raise ConfigurationError(
                f"{request.out} holds another job:\n  {lines}\nrun it with what _job.json says, or choose another "
                "output"
            )
    # Every nth of the plan, so that shards differ by one at most.
    mine = fragments if request.shard is None else fragments[request.shard[0] :: request.shard[1]]
    present = store.names()
    progress = Progress(len(mine))
    for receipt in output.read_receipts(store, [part for part in mine if part.name in present]):
        progress.add(receipt)
    todo = [part for part in mine if part.name not in present]
    return OpenedJob(store, job, fragments, todo, sum(part.rows for part in mine), progress)


async def status(request: BulkRequest) -> BulkReport:
    """How far a job is, from its output alone: the exit code is that of a run which ended so, or INCOMPLETE.

    Raises ConfigurationError when there is no job.
    """

    def look() -> BulkReport:
        store = open_store(request.out)
        data = store.read(_JOB)
        if data is None:
            raise ConfigurationError(f"{request.out} holds no job")
        job = _opened(request, store, data, None)
        code, message = verdict(request.max_rejected, job.progress)
        if job.todo:
            code, message = ExitCode.INCOMPLETE, "the job is not complete: the same command without --status continues"
        return job.progress.report(code, message, success=store.has(SUCCESS))

    return await in_daemon_thread(look, "read output")


async def _drive(request: BulkRequest, job: OpenedJob, worker: Executor, report: OnProgress) -> None:
    """Process the fragments that are left. Raises TooManyRejected, also for rejections of earlier runs."""
    job.check(request.max_rejected)
    known = await in_daemon_thread(lambda: output.deaths(job.store, job.todo), "find deaths")
    for part in job.todo:
        if part.id in known:
            log.warning("a run ended, or still works, on %s %d-%d: done last", part.file.url, part.start, part.stop)
    driver = Driver(
        worker,
        job.job,
        job.progress,
        attempts=request.attempts,
        report=report,
        check=lambda: job.check(request.max_rejected),
        deaths=known,
    )
    await driver.run(job.todo)
