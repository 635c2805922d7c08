"""`embed_many`: split many texts into batches, run some at a time, put the vectors back in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from backend_client._api import arguments
from backend_client._api.assembly import Assembly, OneSpace
from backend_client._resilience.closing import OpenCalls
from backend_client._resilience.threads import DaemonThread
from backend_client.errors import AuthenticationFailed, BatchFailure, ConfigurationError, NPUError, PayloadTooLarge
from backend_client.options import BatchOptions
from backend_client.results import EmbedBatch, EmbedManyResult

EmbedTexts = Callable[[Sequence[str]], Awaitable[EmbedBatch]]
Progress = Callable[[int, int], None]
"""Called with the number of texts that are done, and of all."""


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
    texts: Iterable[str] | AsyncIterable[str],
    embed: EmbedTexts,
    *,
    options: BatchOptions,
    window: int,
    calls: OpenCalls,
) -> AsyncGenerator[EmbedBatch, None]:
    """Yield the batches of any number of texts in their order, each as soon as it is there, at most `window` in memory.

    Texts are read in a thread of their own, so that only the reader waits for them; asynchronous ones in a task. The
    error of the source, or of a batch, is raised when its turn comes: what was there before has been yielded by then.
    Waiting ends with `calls`.
    """
    batcher = Batcher(options)
    pending: deque[asyncio.Task[list[EmbedBatch | BatchFailure]]] = deque()
    reading: asyncio.Future[list[str] | None] | None = None
    ended, problem = False, None
    one = OneSpace()
    read, close = _reader(texts, batcher)
    try:
        while pending or not ended:
            if reading is None and not ended and len(pending) < window:
                reading = asyncio.ensure_future(read())
            if pending and pending[0].done():
                for part in pending.popleft().result():
                    if isinstance(part, BatchFailure):
                        raise part.error
                    yield one.admit(part)
            elif reading is not None and reading.done():
                problem = reading.exception()
                batch = reading.result() if problem is None else None
                ended, reading = batch is None, None
                if batch := batch or batcher.rest():
                    pending.append(asyncio.create_task(_embed_or_split(0, batch, lambda _, part: embed(part))))
            else:
                with calls.open():
                    waited: list[asyncio.Future[Any]] = [*filter(None, [reading]), *islice(pending, 1)]
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if problem is not None:
            raise problem
    finally:
        unfinished: list[asyncio.Future[Any]] = [*filter(None, [reading]), *pending]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await close()


def _reader(
    texts: Iterable[str] | AsyncIterable[str], batcher: Batcher
) -> tuple[Callable[[], Awaitable[list[str] | None]], Callable[[], Awaitable[None]]]:
    """What reads the next full batch, None at the end of the texts, when the batcher has the rest; and what closes it.

    Not a context manager: as an async generator, asyncio would close it together with the one that uses it.
    """
    if isinstance(texts, AsyncIterable):
        later = _batches_as_they_come(texts, batcher)
        return lambda: anext(later, None), later.aclose
    thread, batches = DaemonThread("read texts"), _batches(texts, batcher)

    async def end() -> None:
        thread.end()

    return lambda: thread.run(lambda: next(batches, None)), end


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
    texts: Sequence[str],
    embed: EmbedTexts,
    *,
    options: BatchOptions,
    concurrency: int,
    probing: int,
    progress: Progress | None = None,
) -> EmbedManyResult:
    """Embed all texts, up to `concurrency` batches at a time, each with its own retries.

    Starts with `probing` batches (one per node); each success adds another until `concurrency` run, so that a fleet
    that rejects everything gets few requests. A failed batch does not end the others, except for errors that every
    batch would meet: AuthenticationFailed and ConfigurationError. Those, and any exception of `progress`, cancel the
    rest and propagate unchanged.

    Raises EmbedManyUnavailable when all failed batches failed for want of a node, EmbedManyFailed when some failed for
    other reasons; when every batch failed for one kind of reason, that error itself.
    """
    bounds = cut(texts, options)
    rows = Assembly(len(texts))
    failures: list[BatchFailure] = []
    queue = iter(bounds)
    running: set[asyncio.Task[None]] = set()
    limit = max(1, min(concurrency, probing))
    finished = 0

    async def embed_rows(start: int, part: Sequence[str]) -> EmbedBatch:
        nonlocal limit
        batch = await embed(part)
        rows.put(start, batch)
        limit = min(concurrency, limit + 1)
        return batch

    async def work(start: int, stop: int) -> None:
        nonlocal finished
        parts = await _embed_or_split(start, texts[start:stop], embed_rows)
        failures.extend(part for part in parts if isinstance(part, BatchFailure))
        finished += stop - start
        if progress is not None:
            progress(finished, len(texts))

    try:
        while True:
            while len(running) < limit and (part := next(queue, None)) is not None:
                running.add(asyncio.create_task(work(*part)))
            if not running:
                break
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in done if (error := task.exception()) is not None]
            if errors:
                raise errors[0]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if failures:
        raise rows.failure(failures)
    return rows.result()


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
