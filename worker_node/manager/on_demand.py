"""Starts to serve installed models on their first request, and failed ones once their files have been repaired."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from worker_node.core.errors import DeadlineExceeded, EngineUnavailable, ModelNotFound, NodeError, Overloaded
from worker_node.manager.replacement import Turnover
from worker_node.manager.served import FailedModel, Names, ServedModel
from worker_node.models.catalog import normalise_name
from worker_node.models.directory import InstalledModel
from worker_node.models.store import ModelStore

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")

Build = Callable[[InstalledModel], ServedModel]

_THREADS = 4
_MOST = 32
_READING_RETRY_S = 5.0
_RETRY_S = 10.0


class InThread(Protocol):
    """Calls a function in a thread and returns what it does."""

    def __call__(self, call: Callable[..., R], /, *arguments: object) -> Awaitable[R]:
        """See the class."""


@dataclass(eq=False, slots=True)
class _Task:
    """Work of one `name`; `begun` once a thread has taken it up."""

    name: object
    callers: int = 0
    begun: bool = False
    running: asyncio.Task[Any] | None = None


class FileReading:
    """Reads models' files for requests: at most `most` pieces of work at once, in `threads` threads of its own.

    A disk may be slow, or never respond (a network file system). The caller gets an error at its deadline, and the
    threads that other work needs stay free. `clock` is monotonic seconds.
    """

    def __init__(
        self, *, threads: int = _THREADS, most: int = _MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="read-models")
        self._most = most
        self._clock = clock
        self._tasks: set[_Task] = set()
        self._closed = False

    async def run(self, name: object, work: Callable[[InThread], Awaitable[R]], deadline: float) -> R:
        """Return what `work` returns, by `deadline`; `work` gets a function that calls others in a thread.

        Callers with one `name` share work that no thread has begun. Work that has begun continues when its callers
        leave, so that a later call finds it further on; other work is dropped. Raises DeadlineExceeded, Overloaded,
        EngineUnavailable when the node stops, and what `work` raises.
        """
        task = next((task for task in self._tasks if task.name == name and not task.begun), None)
        if task is None:
            task = self._start(name, work)
        running = cast("asyncio.Task[R]", task.running)
        task.callers += 1
        try:
            left = None if math.isinf(deadline) else max(0.0, deadline - self._clock())
            await asyncio.wait({running}, timeout=left)
        finally:
            task.callers -= 1
            if not (task.callers or task.begun):
                self._tasks.discard(task)  # now, so that no later caller joins it
                running.cancel()
        if running.cancelled():
            raise EngineUnavailable("the node is shutting down; use another node")
        if not running.done():
            raise DeadlineExceeded(
                "the deadline passed while the files of models were read; the disk is slow, or many models are asked "
                "for at once"
            )
        return running.result()

    def close(self) -> None:
        """End what waits. Threads end with the call that they are in."""
        self._closed = True
        for task in self._tasks:
            if task.running is not None:
                task.running.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, name: object, work: Callable[[InThread], Awaitable[R]]) -> _Task:
        if self._closed:
            raise EngineUnavailable("the node is shutting down; use another node")
        if len(self._tasks) >= self._most:
            raise Overloaded(
                f"the files of models are being read for {len(self._tasks)} other requests, which is the bound; the "
                "disk of this node is slow",
                retry_after=_READING_RETRY_S,
            )
        task = _Task(name)

        def in_thread(call: Callable[..., A], /, *arguments: object) -> Awaitable[A]:
            def begin() -> A:
                task.begun = True
                return call(*arguments)

            return asyncio.get_running_loop().run_in_executor(self._threads, begin)

        async def run() -> R:
            return await work(in_thread)

        self._tasks.add(task)
        task.running = asyncio.create_task(run(), name="read models")
        task.running.add_done_callback(lambda ended: self._ended(task, ended))
        return task

    def _ended(self, task: _Task, running: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # All callers may have left.
        error = None if running.cancelled() else running.exception()
        if error is not None and not isinstance(error, NodeError):
            log.error("reading models failed", exc_info=error)


class OnDemand:
    """Builds models by name with `build` and has each served with `add`.

    `failed` are the configured ones that failed. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        names: Names,
        store: ModelStore,
        build: Build,
        turnover: Turnover,
        add: Callable[[ServedModel], None],
        failed: list[FailedModel],
        clock: Callable[[], float],
    ) -> None:
        self.failed = failed
        self.reading = FileReading(clock=clock)
        self._names = names
        self._store = store
        self._build = build
        self._turnover = turnover
        self._add = add
        self._clock = clock
        self._tried: dict[str, float] = {}
        self._building: dict[str, asyncio.Lock] = {}

    async def find(self, name: str, deadline: float) -> ServedModel:
        """The model of that name, which is not served yet; it is served from now on.

        Raises ModelNotFound, also when it is installed but damaged; EngineUnavailable for a configured one that failed;
        DeadlineExceeded; Overloaded when too many look-ups are under way.
        """
        return await self.reading.run(normalise_name(name), lambda in_thread: self._find(name, in_thread), deadline)

    def retry_soon(self) -> None:
        """Files have changed: the next request tries to build a failed model again."""
        self._tried.clear()

    async def _find(self, name: str, in_thread: InThread) -> ServedModel:
        while True:
            if (failed := next((f for f in self.failed if f.answers_to(name)), None)) is not None:
                return await self._repaired(failed, in_thread)
            removals = self._turnover.removals
            served = [model.id for model in self._names.models]
            installed = await self._usable(name, in_thread(self._store.get, name, served))
            async with self._lock(installed.id):
                if (known := self._known(installed.id)) is not None:
                    return known
                if installed.path in self._turnover.removing:
                    raise ModelNotFound(f"model {name[:100]!r} is being removed", param="model")
                model = await self._usable(name, in_thread(self._build, installed))
                # A reload may have added it meanwhile.
                if (known := self._known(installed.id)) is not None:
                    return known
                if removals == self._turnover.removals:
                    self._add(model)
                    return model
            # Files were removed meanwhile: perhaps those of this model.

    async def _repaired(self, failed: FailedModel, in_thread: InThread) -> ServedModel:
        """A configured model that failed, if its files have been repaired."""
        async with self._lock(failed.name):
            if failed not in self.failed:
                return self._names.find(failed.name)
            reason = failed.reason
            if self._clock() >= self._tried.get(failed.name, -math.inf) + _RETRY_S:
                self._tried[failed.name] = self._clock()
                try:
                    model = await in_thread(failed.build)
                except Exception as error:  # noqa: BLE001  (whatever is wrong with the files)
                    reason = error.message if isinstance(error, NodeError) else f"{type(error).__name__}: {error}"
                else:
                    if failed not in self.failed:  # a reload has changed it meanwhile
                        return self._names.find(failed.name)
                    self.failed.remove(failed)
                    self._add(model)
                    return model
        raise EngineUnavailable(f"model {failed.name} cannot be served: {reason}", retry_after=_RETRY_S)

    def _known(self, model_id: str) -> ServedModel | None:
        return next((model for model in self._names.models if model.id == model_id), None)

    def _lock(self, name: str) -> asyncio.Lock:
        """The lock for building that model, so that it is not built twice at once."""
        return self._building.setdefault(normalise_name(name), asyncio.Lock())

    @staticmethod
    async def _usable(name: str, read: Awaitable[R]) -> R:
        """What is read of a model's files. Damage to them is never the fault of the request."""
        try:
            return await read
        except ModelNotFound:
            raise
        except Exception as error:  # tokenizers and OpenVINO raise types of their own for damaged files
            log.warning("model %s cannot be served: %s: %s", name[:100], type(error).__name__, error)
            raise ModelNotFound(
                f"model {name[:100]!r} is installed here but damaged (the node's log says how); delete it and pull it "
                "again",
                param="model",
            ) from error
