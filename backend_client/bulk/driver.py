"""The driver of a run: hands fragments to an executor, counts attempts, and stops when too much is wrong."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable

from backend_client.bulk.executors import Executor, WorkerLost
from backend_client.bulk.fragments import Fragment
from backend_client.bulk.patience import Unanswered
from backend_client.bulk.quarantine import Quarantined
from backend_client.bulk.readers.source import InputChanged
from backend_client.bulk.receipts import Receipt
from backend_client.bulk.stores import OutputFailed
from backend_client.bulk.supervisor import History
from backend_client.bulk.together import cancelled
from backend_client.bulk.window import SLOT, Parts, whole
from backend_client.errors import (
    AuthenticationFailed,
    ConfigurationError,
    NPUError,
    NPUUnavailableError,
)

# These would meet every fragment alike: trying again, or going on, helps nobody.
_FATAL = (AuthenticationFailed, ConfigurationError, NPUUnavailableError, OutputFailed)
# Before a fragment that failed is tried again; doubled each time.
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 30.0


class Progress:
    """The progress of a run: sums over the fragments that are committed, by this run and before."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.done = 0
        self.rows = 0
        self.rejected = 0
        self.incomplete = 0
        self.rows_now = 0
        self.running = 0
        self.failures = 0
        self.lost = 0
        self.served: Counter[str] = Counter()
        self.quarantined: list[Quarantined] = []

    def add(self, receipt: Receipt, *, before: bool = False) -> None:
        """Add a committed fragment; `before`: of an earlier run. Fragments that others committed do not count as this
        run's.
        """
        self.done += 1
        self.rows += receipt.rows
        self.rejected += receipt.rejected
        self.incomplete += receipt.incomplete
        if receipt.won and not before:
            self.rows_now += receipt.rows
            self.served.update(receipt.served)


class TooManyRejected(NPUError):
    """More rows were rejected than the job allows."""


class Driver:
    """One run over the fragments that have no file yet.

    `attempts`: a fragment that failed so often is quarantined, deaths of earlier processes included, and `keep` is
    called with it. `report` is called after each change. `check` raises TooManyRejected. `parts`: of the `SLOT` parts
    of a slot, how many a fragment takes.
    """

    def __init__(
        self,
        executor: Executor,
        progress: Progress,
        *,
        attempts: int,
        report: Callable[[Progress], None],
        check: Callable[[Progress], None],
        keep: Callable[[Quarantined], Awaitable[None]] | None = None,
        history: History | None = None,
        parts: Parts = whole,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._history = history or History()
        self._executor = executor
        self._progress = progress
        self._progress.lost = self._history.lost
        self._attempts = attempts
        self._report = report
        self._check = check
        self._keep = keep
        self._kept = 0
        self._parts = parts
        self._sleep = sleep
        self._failed: Counter[str] = Counter()

    async def run(self, fragments: Iterable[Fragment]) -> None:
        """Process all of them. Raises the first error that would meet every fragment; nothing runs on after that."""
        waiting = deque(fragment for fragment in fragments if not self._deadly(fragment))
        running: dict[asyncio.Task[Receipt], Fragment] = {}
        taken = 0
        changed = asyncio.create_task(self._executor.changed())
        try:
            await self._keep_quarantined()
            while waiting or running:
                while waiting and taken + self._parts(waiting[0]) <= SLOT * self._executor.slots:
                    fragment = waiting.popleft()
                    taken += self._parts(fragment)
                    running[asyncio.create_task(self._attempt(fragment))] = fragment
                self._progress.running = len(running)
                if changed.done():
                    changed.result()
                    changed = asyncio.create_task(self._executor.changed())
                done, _ = await asyncio.wait([*running, changed], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task in done]:
                    fragment = running.pop(task)
                    taken -= self._parts(fragment)
                    if self._settle(fragment, task):
                        waiting.append(fragment)
                self._progress.lost = self._history.lost + self._executor.lost
                self._report(self._progress)
                await self._keep_quarantined()
        finally:
            await cancelled([*running, changed])
            self._progress.running = 0

    async def _keep_quarantined(self) -> None:
        new = self._progress.quarantined[self._kept :]
        self._kept = len(self._progress.quarantined)
        if self._keep is not None:
            for given_up in new:
                await self._keep(given_up)

    def _deadly(self, fragment: Fragment) -> bool:
        """Whether it has killed its process as often as it may fail; then it is quarantined."""
        deaths = self._history.deaths.get(fragment.id, 0)
        if deaths < self._attempts:
            return False
        self._progress.quarantined.append(Quarantined(fragment, deaths, "its process died"))
        return True

    async def _attempt(self, fragment: Fragment) -> Receipt:
        failed = self._failed[fragment.id]
        if failed:
            await self._sleep(min(_FIRST_PAUSE_S * 2 ** (failed - 1), _LAST_PAUSE_S))
        return await self._executor.submit(fragment)

    def _settle(self, fragment: Fragment, task: asyncio.Task[Receipt]) -> bool:
        """Record the outcome of an attempt. Returns whether the fragment is to be tried again."""
        error = task.exception()
        if error is None:
            self._progress.add(task.result())
            self._check(self._progress)
            return False
        if isinstance(error, InputChanged):
            raise ConfigurationError(str(error))
        if isinstance(error, _FATAL) or not isinstance(error, Exception):
            raise error
        self._failed[fragment.id] += 1
        self._progress.failures += 1
        failed = self._failed[fragment.id] + self._history.deaths.get(fragment.id, 0)
        # A request that was not answered for long enough has had its attempts: those of the whole fragment cost more.
        if failed < self._attempts and not isinstance(error, Unanswered):
            return True
        reason = "its worker died" if isinstance(error, WorkerLost) else f"{type(error).__name__}: {error}"
        self._progress.quarantined.append(Quarantined(fragment, failed, reason[:300]))
        return False
