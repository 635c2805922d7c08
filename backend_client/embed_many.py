"""Many texts in one call: cut into batches, embedded several at a time, and joined.

`Assembly` is the only place that joins vectors, and joins only those of one vector space.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
    Sized,
)
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from backend_client import arguments
from backend_client.errors import (
    AuthenticationFailed,
    BatchFailure,
    ConfigurationError,
    DeadlineExceeded,
    EmbedManyFailed,
    EmbedManyUnavailable,
    NPUError,
    NPUUnavailableError,
    PayloadTooLarge,
    VectorSpaceMismatch,
)
from backend_client.lifetime import DaemonThread, Deadline, OpenCalls
from backend_client.options import BatchOptions
from backend_client.results import Attempt, EmbedBatch, EmbedManyResult, Usage

T = TypeVar("T")


class OneSpace:
    """The vector space of one call: that of the first part that is admitted. Parts of any other are refused."""

    def __init__(self) -> None:
        self.space: str | None = None
        self.dimensions = 0

    def admit(self, part: EmbedBatch) -> EmbedBatch:
        """Return the part. Raises VectorSpaceMismatch for one that cannot be compared with the first."""
        dimensions = part.vectors.shape[1]
        if self.space is None:
            self.space, self.dimensions = part.space, dimensions
        if (part.space, dimensions) != (self.space, self.dimensions):
            raise VectorSpaceMismatch(
                f"{part.node} answered in the vector space {part.space} with {dimensions} dimensions, earlier vectors "
                f"of this call are in {self.space} with {self.dimensions}",
                attempts=part.attempts,
                request_id=part.request_id,
            )
        return part


class Assembly:
    """The rows of any number of texts, filled part by part in any order."""

    def __init__(self) -> None:
        self._one = OneSpace()
        self._parts: dict[int, EmbedBatch] = {}

    def put(self, start: int, part: EmbedBatch) -> None:
        """Fill the rows from `start` on. Raises VectorSpaceMismatch."""
        self._parts[start] = self._one.admit(part)

    def result(self, count: int) -> EmbedManyResult:
        """All rows, of `count` texts. Those that were not put hold anything."""
        vectors = np.empty((count if self._parts else 0, self._one.dimensions), np.float32)
        tokens, served, attempts = 0, Counter[str](), list[Attempt]()
        for start in sorted(self._parts):
            # Released one by one: a million vectors fit into memory once, but perhaps not twice.
            part = self._parts.pop(start)
            rows = len(part.vectors)
            vectors[start : start + rows] = part.vectors
            tokens += part.usage.prompt_tokens
            served[part.node] += rows
            attempts += part.attempts
        return EmbedManyResult(
            vectors=vectors,
            space=self._one.space,
            usage=Usage(tokens),
            served=dict(served),
            attempts=tuple(attempts),
        )

    def failure(self, count: int, failures: Sequence[BatchFailure]) -> NPUError:
        """The error of a call with `count` texts some of whose batches failed; when all did for one reason, that error
        itself. The last failure may be that of texts which were not read.
        """
        failures = sorted(failures, key=lambda failure: failure.start)
        first = failures[0]
        vectors = None
        if self._parts:
            vectors = self.result(count).vectors
            for failure in failures:
                vectors[failure.start : failure.stop] = np.nan
        elif len({type(failure.error) for failure in failures}) == 1:
            return first.error
        failed = sum(failure.stop - failure.start for failure in failures)
        unavailable = all(isinstance(failure.error, NPUUnavailableError) for failure in failures)
        kind = EmbedManyUnavailable if unavailable else EmbedManyFailed
        rows = f"{failed} of {count} texts were not embedded, in {len(failures)} batches; "
        where = f"{rows}texts {first.start} to {first.stop - 1}: " if failed else ""
        return kind(f"{where}{first.error.message}", vectors=vectors, space=self._one.space, failures=failures)


Source = Iterable[str] | AsyncIterable[str]
"""Texts; what is a list was checked."""
EmbedTexts = Callable[[Sequence[str]], Awaitable[EmbedBatch]]
Progress = Callable[[int, int], None]
"""Called with the number of texts that are done, and of all; of those read so far where the source has no length."""


class Batcher:
    """Collects texts into batches within both limits of the options; a text over the token limit is alone in one."""

    def __init__(self, options: BatchOptions) -> None:
        self._options = options
        self._texts: list[str] = []
        self._tokens = 0.0

    def add(self, text: str) -> list[str] | None:
        """Add a text. Returns the batch before it when that is full."""
        size = len(text.encode(errors="replace")) / self._options.bytes_per_token
        full = None
        if self._texts and (len(self._texts) == self._options.texts or self._tokens + size > self._options.tokens):
            full = self.rest()
        self._texts.append(text)
        self._tokens += size
        return full

    def rest(self) -> list[str]:
        texts, self._texts, self._tokens = self._texts, [], 0.0
        return texts


def cut(texts: Sequence[str], options: BatchOptions) -> list[tuple[int, int]]:
    """The batches of a sequence as (start, stop)."""
    batcher = Batcher(options)
    sizes = [len(batch) for text in texts if (batch := batcher.add(text)) is not None]
    if rest := batcher.rest():
        sizes.append(len(rest))
    return list(pairwise([0, *accumulate(sizes)]))


async def _batches(texts: Source, batcher: Batcher, thread: DaemonThread | None) -> AsyncGenerator[list[str], None]:
    """The batches that are full, as the texts come. Without a thread to read them in they are there, and checked."""
    if isinstance(texts, AsyncIterable):
        index = 0
        async for text in texts:
            if (full := batcher.add(arguments.text(text, f"texts[{index}]"))) is not None:
                yield full
            index += 1
        return
    batches = filter(None, map(batcher.add, _checked(texts) if thread else texts))
    while batch := await thread.run(lambda: next(batches, None)) if thread else next(batches, None):
        yield batch


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for index, text in enumerate(arguments.ordered(texts)):
        yield arguments.text(text, f"texts[{index}]")


Part = tuple[int, EmbedBatch] | BatchFailure
"""A batch and the number of its first text, or why there is none."""


class _Run:
    """Reads the texts of one call and embeds them, a few batches at a time. Waiting ends with `calls`.

    Only the caller waits for a slow source: it is read in a thread of its own, or in a task if it is asynchronous.
    A list is in memory and was checked. `read` counts texts; `late` says that the time was up before all were read.
    """

    def __init__(self, texts: Source, embed: EmbedTexts, options: BatchOptions, calls: OpenCalls) -> None:
        self._embed = embed
        self._calls = calls
        self._batcher = Batcher(options)
        self._thread = None if isinstance(texts, list | AsyncIterable) else DaemonThread("read texts")
        self._batches = _batches(texts, self._batcher, self._thread)
        self._reading: asyncio.Future[list[str] | None] | None = None
        self._running: list[asyncio.Task[list[Part]]] = []
        self._ended = False
        self._problem: BaseException | None = None
        self.read = 0
        self.late = False

    async def next(self, limit: int, until: Deadline | None = None) -> list[Part] | None:
        """What became of the batch that ended first; None after the last one. Runs up to `limit` batches at once.

        No text is read before there is room for it, nor after `until`. The error of the source is raised after the
        last batch; at once those that every batch would meet, AuthenticationFailed and ConfigurationError.
        """
        while True:
            for task in self._running:
                if task.done():
                    self._running.remove(task)
                    return task.result()
            if self._reading is not None and self._reading.done():
                self._take(self._reading)
            if not self._ended and until is not None and until.remaining() <= 0:
                self._ended = self.late = True
            if not self._ended and self._reading is None and len(self._running) < limit:
                self._reading = asyncio.ensure_future(anext(self._batches, None))
            waited: list[asyncio.Future[Any]] = [*self._running]
            if self._reading is not None and not self._ended:
                waited.append(self._reading)
            if not waited:
                break
            pause = None if until is None or self._ended else until.remaining()
            async with self._calls.open():
                await asyncio.wait(waited, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        if self._problem is not None:
            raise self._problem
        return None

    async def close(self) -> None:
        unfinished: list[asyncio.Future[Any]] = [*filter(None, [self._reading]), *self._running]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await self._batches.aclose()
        if self._thread is not None:
            self._thread.end()

    def _take(self, reading: asyncio.Future[list[str] | None]) -> None:
        """Begin with the batch that was read; at the end, or before an error of the source, with the texts left."""
        self._reading = None
        self._problem = reading.exception()
        batch = reading.result() if self._problem is None else None
        self._ended = batch is None
        if batch := batch or self._batcher.rest():
            self._running.append(asyncio.create_task(_embed_or_split(self.read, batch, self._embed)))
            self.read += len(batch)


async def embed_windowed(
    texts: Source, embed: EmbedTexts, *, options: BatchOptions, window: int, calls: OpenCalls
) -> AsyncGenerator[EmbedBatch, None]:
    """Yield the batches of any number of texts in their order, each as soon as it is there, at most `window` in memory.

    The error of the source, or of a batch, is raised when its turn comes: what was there before has been yielded by
    then. Waiting ends with `calls`.
    """
    one = OneSpace()
    ready: dict[int, list[Part]] = {}
    due = 0
    run = _Run(texts, embed, options, calls)
    try:
        while (parts := await run.next(window - len(ready))) is not None:
            ready[parts[0].start if isinstance(parts[0], BatchFailure) else parts[0][0]] = parts
            while due in ready:
                for part in ready.pop(due):
                    if isinstance(part, BatchFailure):
                        raise part.error
                    due += len(part[1].vectors)
                    yield one.admit(part[1])
    finally:
        await run.close()


async def embed_in_batches(
    texts: Source,
    embed: EmbedTexts,
    *,
    options: BatchOptions,
    concurrency: int,
    probing: int,
    calls: OpenCalls,
    until: Deadline | None = None,
    progress: Progress | None = None,
) -> EmbedManyResult:
    """Embed all texts, up to `concurrency` batches at a time, each with its own retries. Waiting ends with `calls`.

    Starts with `probing` batches (one per node); each success adds another until `concurrency` run, so that a fleet
    that rejects everything gets few requests. A failed batch does not end the others, except for errors that every
    batch would meet: AuthenticationFailed and ConfigurationError. Those, and any exception of `progress`, cancel the
    rest and propagate unchanged; so does one of the source, once the batches before it have ended.

    Raises EmbedManyUnavailable when all failed batches failed for want of a node, EmbedManyFailed when some failed for
    other reasons; when every batch failed for one kind of reason, that error itself.
    """
    rows = Assembly()
    failures: list[BatchFailure] = []
    limit = max(1, min(concurrency, probing))
    finished = 0
    run = _Run(texts, embed, options, calls)

    def total() -> int:
        return max(run.read, len(texts)) if isinstance(texts, Sized) else run.read

    try:
        while (parts := await run.next(limit, until)) is not None:
            for part in parts:
                if isinstance(part, BatchFailure):
                    failures.append(part)
                    finished += part.stop - part.start
                    continue
                start, batch = part
                finished += len(batch.vectors)
                try:
                    rows.put(start, batch)
                    limit = min(concurrency, limit + 1)
                except VectorSpaceMismatch as error:
                    failures.append(BatchFailure(start, start + len(batch.vectors), error))
            if progress is not None:
                progress(finished, total())
    finally:
        await run.close()
    count = total()
    if run.late:
        late = DeadlineExceeded(f"the call's time was up after {run.read} texts had been read; increase `timeout`")
        failures.append(BatchFailure(run.read, count, late))
    if failures:
        raise rows.failure(count, failures)
    return rows.result(count)


async def _embed_or_split(start: int, texts: Sequence[str], embed: EmbedTexts) -> list[Part]:
    """Embed the batch that begins at `start`; if it is too large for a node, its halves, and their halves.

    Raises only what every batch would meet: AuthenticationFailed and ConfigurationError.
    """

    async def part(first: int, last: int) -> Part:
        try:
            return start + first, await embed(texts[first:last])
        except (AuthenticationFailed, ConfigurationError):
            raise
        except NPUError as error:
            if isinstance(error, PayloadTooLarge) and last - first > 1:
                raise
            return BatchFailure(start + first, start + last, error)

    return await in_halves(0, len(texts), part, lambda error: isinstance(error, PayloadTooLarge))


async def in_halves(
    first: int, last: int, serve: Callable[[int, int], Awaitable[T]], divides: Callable[[NPUError], bool]
) -> list[T]:
    """Serve the items from `first` to `last` (exclusive) as one; after an error that `divides`, its halves and theirs.

    Returns the results in the order of the items. Raises other errors, and those of a single item.
    """
    try:
        return [await serve(first, last)]
    except NPUError as error:
        if last - first == 1 or not divides(error):
            raise
    middle = (first + last) // 2
    halves = (first, middle), (middle, last)
    return [result for half in halves for result in await in_halves(*half, serve, divides)]
