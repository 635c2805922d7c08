"""The driver over a scripted executor: attempts, deaths, quarantine, and what stops a run."""

import asyncio
from collections import Counter

import pytest

from backend_client.bulk.inputs import Fragment, InputFile
from backend_client.bulk.output import Progress, Receipt
from backend_client.bulk.run import Driver, TooManyRejected
from backend_client.bulk.stores import OutputFailed
from backend_client.bulk.worker import WorkerLost
from backend_client.errors import ConfigurationError, NPUUnavailableError

FILE = InputFile("file:///in.parquet", 1, "v", "parquet")
FRAGMENTS = [Fragment(FILE, start, start + 10, 10) for start in range(0, 100, 10)]


class ScriptedExecutor:
    """`fails` maps the start of a fragment to the errors of its attempts; afterwards it succeeds."""

    def __init__(self, fails=None, slots=3):
        self.fails = {start: list(errors) for start, errors in (fails or {}).items()}
        self.slots = slots
        self.lost = 0
        self.isolated = False
        self.attempts = Counter()
        self.running = self.most = 0
        self.resized = asyncio.Event()

    async def submit(self, _job, fragment):
        self.attempts[fragment.start] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if self.fails.get(fragment.start):
                error = self.fails[fragment.start].pop(0)
                self.lost += isinstance(error, WorkerLost)
                raise error
            return Receipt(fragment=fragment.id, rows=10, rejected=0)
        finally:
            self.running -= 1

    async def changed(self):
        await self.resized.wait()
        self.resized.clear()


async def drive(executor, *, check=lambda _: None, deaths=None):
    progress = Progress(len(FRAGMENTS))
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    driver = Driver(
        executor,
        None,
        progress,
        attempts=3,
        report=lambda _: None,
        check=lambda: check(progress),
        deaths=deaths,
        sleep=sleep,
    )
    await driver.run(FRAGMENTS)
    return progress, pauses


async def test_every_fragment_is_submitted_once_and_no_more_at_once_than_there_are_slots():
    executor = ScriptedExecutor()
    progress, pauses = await drive(executor)
    assert executor.attempts == dict.fromkeys(range(0, 100, 10), 1)
    assert (progress.done, progress.rows, executor.most, pauses) == (10, 100, 3, [])


async def test_a_failed_fragment_is_tried_again_after_a_pause():
    executor = ScriptedExecutor({30: [OSError("no answer"), WorkerLost()]})
    progress, pauses = await drive(executor)
    assert executor.attempts[30] == 3
    assert (progress.done, progress.failures, progress.lost, progress.quarantined) == (10, 2, 1, {})
    assert pauses == [1.0, 2.0]


async def test_a_fragment_that_kills_its_worker_each_time_is_quarantined_and_the_others_are_done():
    executor = ScriptedExecutor({30: [WorkerLost()] * 9})
    progress, _ = await drive(executor)
    assert executor.attempts[30] == 3
    assert progress.quarantined == {FRAGMENTS[3].id: "file:///in.parquet 30-40: its worker died"}
    assert progress.done == 9


@pytest.mark.parametrize("error", [ConfigurationError("wrong"), OutputFailed("full")])
async def test_an_error_that_would_meet_every_fragment_ends_the_run(error):
    executor = ScriptedExecutor({0: [error]}, slots=1)
    with pytest.raises(type(error)):
        await drive(executor)
    assert executor.attempts.total() == 1
    assert executor.running == 0


async def test_a_fleet_that_is_down_for_one_worker_ends_no_run_in_which_others_are_served():
    executor = ScriptedExecutor({30: [NPUUnavailableError("down here")]}, slots=2)
    progress, _ = await drive(executor)
    assert (progress.done, progress.quarantined) == (10, {})
    executor = ScriptedExecutor({90: [NPUUnavailableError("down")]}, slots=1)
    with pytest.raises(NPUUnavailableError):
        await drive(executor)


async def test_nothing_is_submitted_after_too_many_rows_were_rejected():
    def check(progress):
        if progress.done == 4:
            raise TooManyRejected("too many")

    executor = ScriptedExecutor(slots=1)
    with pytest.raises(TooManyRejected):
        await drive(executor, check=check)
    assert executor.attempts.total() == 4


async def test_a_run_waits_while_there_is_no_worker_and_goes_on_when_one_comes():
    executor = ScriptedExecutor(slots=0)
    run = asyncio.create_task(drive(executor))
    for _ in range(5):
        await asyncio.sleep(0)
    assert executor.attempts == {}
    executor.slots = 2
    executor.resized.set()
    progress, _ = await run
    assert (progress.done, executor.most) == (10, 2)


@pytest.mark.parametrize(("isolated", "most"), [(False, 1), (True, 3)], ids=["one process", "Ray"])
async def test_fragments_with_which_processes_died_are_done_last_and_alone_where_a_death_ends_all(isolated, most):
    executor = ScriptedExecutor()
    executor.isolated = isolated
    dead, together, submit = FRAGMENTS[:4], [], executor.submit

    async def submitted(job, fragment):
        if fragment in dead:
            assert executor.attempts.total() >= 6
            together.append(executor.running + 1)
        return await submit(job, fragment)

    executor.submit = submitted
    progress, _ = await drive(executor, deaths=dict.fromkeys((part.id for part in dead), 1))
    assert (progress.done, max(together)) == (10, most)
