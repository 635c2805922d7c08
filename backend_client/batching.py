"""`embed_many`: cut many texts into batches, run some at a time, put the vectors back in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from backend_client.errors import EmbedManyFailed, NPUError, PayloadTooLarge
from backend_client.options import BatchOptions
from backend_client.results import BatchFailure, EmbedBatch, EmbedManyResult, Usage

EmbedTexts = Callable[[Sequence[str]], Awaitable[EmbedBatch]]
Progress = Callable[[int, int], None]
"""Called with the number of texts that are done, and of all."""


def cut(texts: Sequence[str], options: BatchOptions) -> list[tuple[int, int]]:
    """Batches as (start, stop), within both limits of the options; a text over the token limit is one by itself."""
    bounds: list[tuple[int, int]] = []
    start, tokens = 0, 0.0
    for index, text in enumerate(texts):
        size = len(text.encode(errors="replace")) / options.bytes_per_token
        if index > start and (index - start == options.texts or tokens + size > options.tokens):
            bounds.append((start, index))
            start, tokens = index, 0.0
        tokens += size
    if start < len(texts):
        bounds.append((start, len(texts)))
    return bounds


async def embed_in_batches(
    texts: Sequence[str],
    embed: EmbedTexts,
    *,
    options: BatchOptions,
    concurrency: int,
    progress: Progress | None = None,
) -> EmbedManyResult:
    """Embed all texts, `concurrency` batches at a time, each with its own retries.

    Raises EmbedManyFailed when some batches failed; when all did, for one kind of reason, that error itself.
    """
    bounds = cut(texts, options)
    batches: dict[int, list[EmbedBatch]] = {}
    failures: list[BatchFailure] = []
    queue = iter(bounds)
    finished = 0

    async def work() -> None:
        nonlocal finished
        for start, stop in queue:
            try:
                batches[start] = await _embed_or_split(texts[start:stop], embed)
            except NPUError as error:
                failures.append(BatchFailure(start, stop, error))
            finished += stop - start
            if progress is not None:
                progress(finished, len(texts))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bounds))):
            group.create_task(work())
    if failures:
        raise _failed(texts, bounds, batches, sorted(failures, key=lambda failure: failure.start))
    return _joined([part for start, _ in bounds for part in batches[start]])


async def _embed_or_split(texts: Sequence[str], embed: EmbedTexts) -> list[EmbedBatch]:
    """One batch; in halves, and halves of halves, when a node finds it too large."""
    try:
        return [await embed(texts)]
    except PayloadTooLarge:
        if len(texts) == 1:
            raise
    middle = len(texts) // 2
    return [*await _embed_or_split(texts[:middle], embed), *await _embed_or_split(texts[middle:], embed)]


def _joined(parts: list[EmbedBatch]) -> EmbedManyResult:
    served: dict[str, int] = {}
    for part in parts:
        served[part.node] = served.get(part.node, 0) + len(part.vectors)
    return EmbedManyResult(
        vectors=np.concatenate([part.vectors for part in parts]) if parts else np.empty((0, 0), np.float32),
        space=parts[0].space if parts else None,
        usage=Usage(sum(part.usage.prompt_tokens for part in parts)),
        served=served,
        attempts=tuple(attempt for part in parts for attempt in part.attempts),
    )


def _failed(
    texts: Sequence[str],
    bounds: list[tuple[int, int]],
    batches: dict[int, list[EmbedBatch]],
    failures: list[BatchFailure],
) -> NPUError:
    if not batches and len({type(failure.error) for failure in failures}) == 1:
        return failures[0].error
    vectors = None
    for start, _ in bounds:
        offset = start
        for part in batches.get(start, ()):
            if vectors is None:
                vectors = np.full((len(texts), part.vectors.shape[1]), np.nan, np.float32)
            vectors[offset : offset + len(part.vectors)] = part.vectors
            offset += len(part.vectors)
    count = sum(failure.stop - failure.start for failure in failures)
    first = failures[0]
    return EmbedManyFailed(
        f"{count} of {len(texts)} texts were not embedded, in {len(failures)} batches; "
        f"texts {first.start} to {first.stop - 1}: {first.error.message}",
        vectors=vectors,
        failures=failures,
    )
