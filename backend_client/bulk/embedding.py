"""Embedding the texts of a chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from backend_client.bulk.job import BulkJob
from backend_client.bulk.patience import Patience
from backend_client.bulk.results import Results
from backend_client.bulk.together import together
from backend_client.bulk.vectors import Vectors
from backend_client.client import InferenceClient
from backend_client.embed_many import cut
from backend_client.errors import PayloadTooLarge
from backend_client.results import EmbedOptions

# A request that took less may be doubled; one that took more is halved. Well below the limit of an attempt, 10 s.
_QUICK_S, _SLOW_S = 1.0, 4.0
# In one request, and on their way in all: with many nodes, requests stay smaller.
_MOST_TEXTS, _MOST_UNDER_WAY = 256, 8192
_FEW_TEXTS = 256


class BatchSize:
    """How many texts a request should have: half the requests cost the client a quarter less CPU for each text.

    Grows from `least` while the fleet answers at once, and shrinks back when it does not. `slots`: requests at once.
    """

    def __init__(self, least: int, slots: int = 1) -> None:
        self._least = least
        self._most = min(_MOST_TEXTS, max(_FEW_TEXTS, _MOST_UNDER_WAY // slots))
        self.texts = least

    def observe(self, texts: int, seconds: float) -> None:
        """Record how long a request of so many texts took, its wait at the node included."""
        if seconds > _SLOW_S:
            self.texts = max(self._least, self.texts // 2)
        elif seconds < _QUICK_S and texts == self.texts:
            self.texts = max(self.texts, min(2 * self.texts, self._most))

    def refused(self, texts: int) -> None:
        """Record that a node takes no request of so many texts."""
        if texts > self._least:
            self._most = self.texts = max(self._least, texts // 2)


class Embedding:
    """Embeds chunks in batches; at most `slots` of them are on their way at once, over all chunks."""

    def __init__(
        self, client: InferenceClient, job: BulkJob, options: EmbedOptions, slots: int, patience: float
    ) -> None:
        self._client = client
        self._job = job
        self._options = options
        self._slots = asyncio.Semaphore(slots)
        self._count = slots
        self._patience = Patience(patience)
        self._batch = client.npu.options.batch
        self._size = BatchSize(self._batch.texts, slots)

    @property
    def rows_ahead(self) -> int:
        """See Work: two requests for each that may be on its way; large ones need not wait for each other."""
        return self._count * max(2 * self._batch.texts, self._size.texts)

    def problems(self, values: Sequence[Any]) -> dict[int, str]:
        """Which values cannot be sent, and why."""
        return {
            row: problem
            for row, value in enumerate(values)
            # Most texts pass without a call.
            if not (type(value) is str and value.isascii()) and (problem := text_problem(value))
        }

    async def run(self, inputs: Sequence[Any]) -> Results:
        """The vectors of the texts. Raises what `Patience.serve` raises."""
        vectors = Vectors(len(inputs), self._job.dimensions)
        results = Results(len(inputs), vectors)

        async def serve(rows: Sequence[int]) -> None:
            start, stop = rows[0], rows[-1] + 1
            began = time.monotonic()
            try:
                batch = await self._client.embed_batch(inputs[start:stop], **self._options)
            except PayloadTooLarge:
                self._size.refused(stop - start)
                raise
            self._size.observe(stop - start, time.monotonic() - began)
            vectors.put(start, batch.vectors)
            results.tokens += batch.usage.prompt_tokens
            results.put_origin(start, stop, batch)
            results.space[start:stop] = [batch.space] * (stop - start)

        def refuse(row: int, reason: str) -> None:
            results.refused[row] = reason

        async def part(rows: Sequence[int]) -> None:
            async with self._slots:
                await self._patience.serve(rows, serve, refuse)

        await together(part(range(start, stop)) for start, stop in self._batches(inputs))
        return results

    def _batches(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """The rows of each request, as (start, stop)."""
        limit = self._batch.tokens * self._batch.bytes_per_token
        length = sum(map(len, texts)) / max(1, len(texts))
        if length * self._batch.texts > limit:
            return cut(texts, self._batch)
        # As many bytes more as texts: it is quick with those, too.
        grown = limit * self._size.texts / self._batch.texts
        size = min(self._size.texts, max(self._batch.texts, int(grown / max(1.0, length))))
        return [(start, min(start + size, len(texts))) for start in range(0, len(texts), size)]


def text_problem(value: Any) -> str:
    """Why a value is no text that can be sent; "" when it is."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "invalid UTF-8"
    if not isinstance(value, str):
        return f"not text, but {type(value).__name__}"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "a lone surrogate, which is not valid Unicode"
    return ""
