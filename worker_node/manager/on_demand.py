"""Starts to serve installed models on their first request, and failed ones once their files have been repaired."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from worker_node.core.errors import DeadlineExceeded, EngineUnavailable, ModelNotFound, NodeError, Overloaded
from worker_node.manager.reconciler import Reconciler
from worker_node.manager.replacement import Replacement
from worker_node.manager.served import FailedModel, Names, ServedModel
from worker_node.models.catalog import normalise_name
from worker_node.models.directory import InstalledModel
from worker_node.models.store import ModelStore

log = logging.getLogger(__name__)

R = TypeVar("R")

Build = Callable[[InstalledModel], ServedModel]

_THREADS = 4
_MOST = 32
_READING_RETRY_S = 5.0
_RETRY_S = 10.0


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
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    def in_thread(self, call: Callable[..., R], /, *arguments: object) -> asyncio.Future[R]:
        """Call a function in a thread; for the work that `run` is given."""
        return asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def start(self, work: Coroutine[None, None, R]) -> asyncio.Task[R]:
        """Start work, which continues when its callers leave. Raises Overloaded, EngineUnavailable."""
        try:
            if self._closed:
                raise EngineUnavailable("the node is shutting down; use another node")
            if len(self._running) >= self._most:
                raise Overloaded(
                    f"the files of models are being read for {len(self._running)} other requests, which is the bound; "
                    "the disk of this node is slow",
                    retry_after=_READING_RETRY_S,
                )
        except NodeError:
            work.close()
            raise
        task = asyncio.create_task(work, name="read models")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its callers may have left
        return task

    async def result(self, task: asyncio.Task[R], deadline: float) -> R:
        """Return what the work returns. Raises what it raises, DeadlineExceeded, and EngineUnavailable on `close`."""
        left = None if math.isinf(deadline) else max(0.0, deadline - self._clock())
        await asyncio.wait({task}, timeout=left)
        if task.cancelled():
            raise EngineUnavailable("the node is shutting down; use another node")
        if not task.done():
            raise DeadlineExceeded(
                "the deadline passed while the files of models were read; the disk is slow, or many models are asked "
                "for at once"
            )
        return task.result()

    def close(self) -> None:
        """End what waits. Threads end with the call that they are in."""
        self._closed = True
        for task in self._running:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)


class OnDemand:
    """Builds models by name with `build` and has the reconciler serve them. `clock` is monotonic seconds."""

    def __init__(
        self,
        names: Names,
        store: ModelStore,
        build: Build,
        replacement: Replacement,
        reconciler: Reconciler,
        clock: Callable[[], float],
    ) -> None:
        self.reading = FileReading(clock=clock)
        self._names = names
        self._store = store
        self._build = build
        self._replacement = replacement
        self._reconciler = reconciler
        self._clock = clock
        self._tried: dict[str, float] = {}
        self._building: dict[str, asyncio.Lock] = {}
        # Look-ups under way by name, which later callers share.
        self._lookups: dict[str, asyncio.Task[ServedModel]] = {}

    async def find(self, name: str, deadline: float) -> ServedModel:
        """The model of that name, which is not served yet; it is served from now on.

        Raises ModelNotFound, also when it is installed but damaged; EngineUnavailable for a configured one that failed;
        DeadlineExceeded; Overloaded when too many look-ups are under way.
        """
        key = normalise_name(name)
        if key not in self._lookups:
            lookup = self._lookups[key] = self.reading.start(self._find(name))
            lookup.add_done_callback(lambda ended: self._lookups.get(key) is ended and self._lookups.pop(key))
        return await self.reading.result(self._lookups[key], deadline)

    def retry_soon(self) -> None:
        """Files have changed: the next request looks for its model again, also for one that failed."""
        self._tried.clear()
        self._lookups.clear()

    async def _find(self, name: str) -> ServedModel:
        in_thread = self.reading.in_thread
        while True:
            if (failed := next((f for f in self._names.failed if f.answers_to(name)), None)) is not None:
                return await self._repaired(failed)
            removals = self._replacement.removals
            served = [model.id for model in self._names.models]
            installed = await self._usable(name, in_thread(self._store.get, name, served))
            async with self._lock(installed.id):
                if (known := self._known(installed.id)) is not None:
                    return known
                if installed.path in self._replacement.removing:
                    raise ModelNotFound(f"model {name[:100]!r} is being removed", param="model")
                model = await self._usable(name, in_thread(self._build, installed))
                # A reload may have added it meanwhile.
                if (known := self._known(installed.id)) is not None:
                    return known
                if removals == self._replacement.removals:
                    self._reconciler.add(model)
                    return model
            # Files were removed meanwhile: perhaps those of this model.

    async def _repaired(self, failed: FailedModel) -> ServedModel:
        """A configured model that failed, if its files have been repaired."""
        async with self._lock(failed.name):
            if failed not in self._names.failed:
                return self._names.find(failed.name)
            reason = failed.reason
            if self._clock() >= self._tried.get(failed.name, -math.inf) + _RETRY_S:
                self._tried[failed.name] = self._clock()
                try:
                    model = await self.reading.in_thread(failed.build)
                except Exception as error:  # noqa: BLE001  (whatever is wrong with the files)
                    reason = error.message if isinstance(error, NodeError) else f"{type(error).__name__}: {error}"
                else:
                    if failed not in self._names.failed:  # a reload has changed it meanwhile
                        return self._names.find(failed.name)
                    self._names.failed.remove(failed)
                    self._reconciler.add(model)
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
