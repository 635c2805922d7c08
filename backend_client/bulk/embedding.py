"""Embedding the texts of a chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from backend_client._api.inference_client import InferenceClient
from backend_client.bulk.job import BulkJob
from backend_client.bulk.patience import Patience
from backend_client.bulk.results import Results
from backend_client.bulk.together import together
from backend_client.results import EmbedBatch, EmbedOptions


class Embedding:
    """Embeds chunks in batches; at most `slots` of them are on their way at once, over all chunks."""

    def __init__(
        self, client: InferenceClient, job: BulkJob, options: EmbedOptions, slots: int, patience: float
    ) -> None:
        self._client = client
        self._job = job
        self._options = options
        self._slots = asyncio.Semaphore(slots)
        self._patience = Patience(lambda: client.embed("canary", **options), patience)
        # Of a batch that a node finds too large the client makes several; this is the most that one may be.
        self._texts = client.npu.options.batch.texts
        self.rows_ahead = 2 * slots * self._texts

    def problem(self, value: Any) -> str:
        """Why a value cannot be sent; "" when it can."""
        return text_problem(value)

    async def run(self, inputs: Sequence[Any]) -> Results:
        """The vectors of the texts. Raises what `Patience.serve` raises."""
        results = Results(len(inputs), np.zeros((len(inputs), self._job.dimensions), np.float32))

        async def serve(rows: Sequence[int]) -> None:
            batches = [part async for part in self._client.embed_stream([inputs[row] for row in rows], **self._options)]
            done = 0
            for batch in batches:
                self._put(results, rows[done : done + len(batch.vectors)], batch)
                done += len(batch.vectors)

        def refuse(row: int, reason: str) -> None:
            results.refused[row] = reason

        async def part(rows: Sequence[int]) -> None:
            async with self._slots:
                await self._patience.serve(rows, serve, refuse)

        whole = range(len(inputs))
        await together(part(whole[start : start + self._texts]) for start in range(0, len(inputs), self._texts))
        return results

    def _put(self, results: Results, rows: Sequence[int], batch: EmbedBatch) -> None:
        results.values[rows[0] : rows[-1] + 1] = batch.vectors
        results.tokens += batch.usage.prompt_tokens
        results.put_origin(rows, batch)
        for row in rows:
            results.space[row] = batch.space


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
