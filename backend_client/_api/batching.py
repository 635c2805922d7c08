"""`embed_many`: split many texts into batches, run some at a time, put the vectors back in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from itertools import accumulate

from backend_client._api.assembly import Assembly, OneSpace
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
    texts: AsyncIterable[str], embed: EmbedTexts, *, options: BatchOptions, window: int
) -> AsyncGenerator[EmbedBatch, None]:
    """Yield the batches of any number of texts in their order, with at most `window` of them in memory.

    The error of a batch that failed comes when its turn does; all before it have been yielded by then.
    """
    pending: deque[asyncio.Task[list[EmbedBatch]]] = deque()
    one = OneSpace()
    try:
        async for batch in _batches(texts, options):
            if len(pending) == window:
                for part in await pending[0]:
                    yield one.admit(part)
                pending.popleft()
            pending.append(asyncio.create_task(_embed_or_split(batch, embed)))
        while pending:
            for part in await pending[0]:
                yield one.admit(part)
            pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _batches(texts: AsyncIterable[str], options: BatchOptions) -> AsyncGenerator[list[str], None]:
    batcher = Batcher(options)
    async for text in texts:
        if (full := batcher.add(text)) is not None:
            yield full
    if rest := batcher.rest():
        yield rest


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

    async def work(start: int, stop: int) -> None:
        nonlocal limit, finished
        try:
            rows.put(start, await _embed_or_split(texts[start:stop], embed))
            limit = min(concurrency, limit + 1)
        except (AuthenticationFailed, ConfigurationError):
            raise
        except NPUError as error:
            failures.append(BatchFailure(start, stop, error))
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


async def _embed_or_split(texts: Sequence[str], embed: EmbedTexts) -> list[EmbedBatch]:
    """Embed one batch; if it is too large for a node, its halves, and their halves."""
    try:
        return [await embed(texts)]
    except PayloadTooLarge:
        if len(texts) == 1:
            raise
    middle = len(texts) // 2
    return [*await _embed_or_split(texts[:middle], embed), *await _embed_or_split(texts[middle:], embed)]
