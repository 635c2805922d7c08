"""Many texts in one call: cut into batches, embedded several at a time, and joined.

`Assembly` is the only place that joins vectors, and joins only those of one vector space.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
    Sized,
)
from itertools import accumulate, islice
from typing import Any

import numpy as np
import numpy.typing as npt

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
        if part.space != self.space:
            raise VectorSpaceMismatch(
                f"{part.node} answered in the vector space {part.space}, earlier vectors of this call are in "
                f"{self.space}",
                attempts=part.attempts,
                request_id=part.request_id,
            )
        if dimensions != self.dimensions:
            raise VectorSpaceMismatch(
                f"{part.node} answered with {dimensions} dimensions, earlier vectors of this call have "
                f"{self.dimensions}",
                attempts=part.attempts,
                request_id=part.request_id,
            )
        return part


class Assembly:
    """The rows of any number of texts, filled part by part in any order."""

    def __init__(self) -> None:
        self._one = OneSpace()
        self._vectors: npt.NDArray[np.float32] | None = None
        self._tokens = 0
        self._served = Counter[str]()
        self._attempts: dict[int, tuple[Attempt, ...]] = {}

    def put(self, start: int, part: EmbedBatch) -> None:
        """Fill the rows from `start` on. Raises VectorSpaceMismatch."""
        self._one.admit(part)
        rows = len(part.vectors)
        self._grow(start + rows)[start : start + rows] = part.vectors
        self._tokens += part.usage.prompt_tokens
        self._served[part.node] += rows
        self._attempts[start] = part.attempts

    def _grow(self, least: int, *, spare: bool = True) -> npt.NDArray[np.float32]:
        """The vectors, with at least so many rows; without `spare` exactly so many."""
        vectors = np.empty((0, self._one.dimensions), np.float32) if self._vectors is None else self._vectors
        if least > len(vectors) or not spare:
            # In place: the system moves large blocks without copying them.
            vectors.resize((least + least // 2 if spare else least, self._one.dimensions), refcheck=False)
        self._vectors = vectors
        return vectors

    def result(self, count: int) -> EmbedManyResult:
        """All rows. Only when every row of `count` texts has been put."""
        if self._vectors is not None:
            self._grow(count, spare=False)
        return EmbedManyResult(
            vectors=np.empty((0, 0), np.float32) if self._vectors is None else self._vectors,
            space=self._one.space,
            usage=Usage(self._tokens),
            served=dict(self._served),
            attempts=tuple(attempt for start in sorted(self._attempts) for attempt in self._attempts[start]),
        )

    def failure(self, count: int, failures: Sequence[BatchFailure]) -> NPUError:
        """The error of a call with `count` texts some of whose batches failed; when all did for one reason, that error
        itself. The last failure may be that of texts which were not read.
        """
        failures = sorted(failures, key=lambda failure: failure.start)
        first = failures[0]
        if self._vectors is None and len({type(failure.error) for failure in failures}) == 1:
            return first.error
        if self._vectors is not None:
            vectors = self._grow(count, spare=False)
            for failure in failures:
                vectors[failure.start : failure.stop] = np.nan
        failed = sum(failure.stop - failure.start for failure in failures)
        unavailable = all(isinstance(failure.error, NPUUnavailableError) for failure in failures)
        kind = EmbedManyUnavailable if unavailable else EmbedManyFailed
        rows = f"{failed} of {count} texts were not embedded, in {len(failures)} batches; "
        where = f"{rows}texts {first.start} to {first.stop - 1}: " if failed else ""
        return kind(
            f"{where}{first.error.message}",
            vectors=self._vectors,
            space=self._one.space,
            failures=failures,
        )


# `embed_many`: split many texts into batches, run some at a time, put the vectors back in order.

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
        """The texts of the unfinished batch, which is emptied."""
        texts, self._texts, self._tokens = self._texts, [], 0.0
        return texts


def cut(texts: Sequence[str], options: BatchOptions) -> list[tuple[int, int]]:
    """The batches of a sequence as (start, stop)."""
    batcher = Batcher(options)
    sizes = [len(batch) for text in texts if (batch := batcher.add(text)) is not None]
    if rest := batcher.rest():
        sizes.append(len(rest))
    stops = list(accumulate(sizes))
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


async def embed_windowed(
    texts: Source, embed: EmbedTexts, *, options: BatchOptions, window: int, calls: OpenCalls
) -> AsyncGenerator[EmbedBatch, None]:
    """Yield the batches of any number of texts in their order, each as soon as it is there, at most `window` in memory.

    The error of the source, or of a batch, is raised when its turn comes: what was there before has been yielded by
    then. Waiting ends with `calls`.
    """
    pending: deque[asyncio.Task[list[EmbedBatch | BatchFailure]]] = deque()
    one = OneSpace()
    source = _Reader(texts, options)
    try:
        while pending or not source.ended:
            if len(pending) < window:
                source.read_on()
            if pending and pending[0].done():
                for part in pending.popleft().result():
                    if isinstance(part, BatchFailure):
                        raise part.error
                    yield one.admit(part)
            elif source.reading is not None and source.reading.done():
                if batch := source.take():
                    pending.append(asyncio.create_task(_embed_or_split(0, batch, lambda _, part: embed(part))))
            else:
                with calls.open():
                    waited: list[asyncio.Future[Any]] = [*filter(None, [source.reading]), *islice(pending, 1)]
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if source.problem is not None:
            raise source.problem
    finally:
        await source.close(*pending)


class _Reader:
    """Reads texts batch by batch, so that only the caller waits for a slow source: in a thread of its own, or in a task
    if it is asynchronous. A list is in memory and was checked.

    `reading` is the next batch, `problem` the error of the source, after which it has `ended`.
    """

    def __init__(self, texts: Source, options: BatchOptions) -> None:
        self._batcher = Batcher(options)
        self._read, self._close = _reader(texts, self._batcher)
        self.reading: asyncio.Future[list[str] | None] | None = None
        self.ended = False
        self.problem: BaseException | None = None

    def read_on(self) -> None:
        """Begin to read the next batch, unless one is being read."""
        if self.reading is None and not self.ended:
            self.reading = asyncio.ensure_future(self._read())

    def take(self) -> list[str]:
        """The batch that was read; at the end those texts that fill none."""
        reading, self.reading = self.reading, None
        batch = None
        if reading is not None:
            self.problem = reading.exception()
            batch = reading.result() if self.problem is None else None
        self.ended = batch is None
        return batch or self._batcher.rest()

    async def close(self, *tasks: asyncio.Future[Any]) -> None:
        """Stop reading, and the tasks that embed what was read."""
        unfinished = [*filter(None, [self.reading]), *tasks]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await self._close()


def _reader(
    texts: Source, batcher: Batcher
) -> tuple[Callable[[], Coroutine[Any, Any, list[str] | None]], Callable[[], Awaitable[None]]]:
    """What reads the next full batch, None at the end of the texts, when the batcher has the rest; and what closes it.

    Not a context manager: as an async generator, asyncio would close it together with the one that uses it.
    """
    if isinstance(texts, AsyncIterable):
        later = _batches_as_they_come(texts, batcher)
        return lambda: _next(later), later.aclose
    in_memory = isinstance(texts, list)
    batches = filter(None, map(batcher.add, texts)) if in_memory else _batches(texts, batcher)
    thread = None if in_memory else DaemonThread("read texts")

    async def read() -> list[str] | None:
        return next(batches, None) if thread is None else await thread.run(lambda: next(batches, None))

    async def close() -> None:
        if thread is not None:
            thread.end()

    return read, close


async def _next(batches: AsyncIterator[list[str]]) -> list[str] | None:
    return await anext(batches, None)


def _batches(texts: Iterable[str], batcher: Batcher) -> Iterator[list[str]]:
    for index, text in enumerate(arguments.ordered(texts)):
        if (full := batcher.add(arguments.text(text, f"texts[{index}]"))) is not None:
            yield full


async def _batches_as_they_come(texts: AsyncIterable[str], batcher: Batcher) -> AsyncGenerator[list[str], None]:
    index = 0
    async for text in texts:
        if (full := batcher.add(arguments.text(text, f"texts[{index}]"))) is not None:
            yield full
        index += 1


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
    batch would meet: AuthenticationFailed and ConfigurationError. Those, and any exception of the source or of
    `progress`, cancel the rest and propagate unchanged. No text is read before there is room for it, nor after `until`.

    Raises EmbedManyUnavailable when all failed batches failed for want of a node, EmbedManyFailed when some failed for
    other reasons; when every batch failed for one kind of reason, that error itself.
    """
    rows = Assembly()
    failures: list[BatchFailure] = []
    running: set[asyncio.Future[Any]] = set()
    limit = max(1, min(concurrency, probing))
    count = finished = 0
    source = _Reader(texts, options)

    async def embed_rows(start: int, part: Sequence[str]) -> EmbedBatch:
        nonlocal limit
        batch = await embed(part)
        rows.put(start, batch)
        limit = min(concurrency, limit + 1)
        return batch

    async def work(start: int, batch: Sequence[str]) -> None:
        nonlocal finished
        parts = await _embed_or_split(start, batch, embed_rows)
        failures.extend(part for part in parts if isinstance(part, BatchFailure))
        finished += len(batch)
        if progress is not None:
            progress(finished, total())

    def total() -> int:
        return max(count, len(texts)) if isinstance(texts, Sized) else count

    try:
        while running or not source.ended:
            if not source.ended and until is not None and until.remaining() <= 0:
                source.ended = True
                late = DeadlineExceeded(f"the call's time was up after {count} texts had been read; increase `timeout`")
                failures.append(BatchFailure(count, total(), late))
                count = total()
                continue
            if len(running) < limit:
                source.read_on()
            waited = running if source.ended else running.union(filter(None, [source.reading]))
            pause = None if until is None or source.ended else until.remaining()
            with calls.open():
                done, _ = await asyncio.wait(waited, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            for task in done & running:
                task.result()
            running -= done
            if source.reading in done:
                batch = source.take()
                if source.problem is not None:
                    raise source.problem
                if batch:
                    running.add(asyncio.create_task(work(count, batch)))
                count += len(batch)
    finally:
        await source.close(*running)
    if failures:
        raise rows.failure(count, failures)
    return rows.result(count)


async def _embed_or_split(
    start: int, texts: Sequence[str], embed: Callable[[int, Sequence[str]], Awaitable[EmbedBatch]]
) -> list[EmbedBatch | BatchFailure]:
    """Embed the batch that begins at `start`; if it is too large for a node, its halves, and their halves.

    Raises only what every batch would meet: AuthenticationFailed and ConfigurationError.
    """
    try:
        return [await embed(start, texts)]
    except (AuthenticationFailed, ConfigurationError):
        raise
    except NPUError as error:
        if not isinstance(error, PayloadTooLarge) or len(texts) == 1:
            return [BatchFailure(start, start + len(texts), error)]
    middle = len(texts) // 2
    halves = (start, texts[:middle]), (start + middle, texts[middle:])
    return [part for half in halves for part in await _embed_or_split(*half, embed)]
