"""The methods that every client has, whichever backend does the work."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from backend_client._api import arguments
from backend_client._api.batching import Progress, Source, embed_in_batches, embed_windowed
from backend_client._api.chat_methods import ChatMethods
from backend_client._api.task_methods import TaskMethods
from backend_client._api.token_stream import TokenStream
from backend_client._protocol.jobs import EmbedJob, GenerateJob, split_options
from backend_client._resilience.loop_end import OneLoop
from backend_client.results import (
    EmbedBatch,
    EmbedManyResult,
    EmbedOptions,
    EmbedResult,
    GenerateOptions,
    GenerateResult,
)
from backend_client.results.origin import origin_fields


class BaseClient(ChatMethods, TaskMethods):
    """All tasks over a backend. Use as `async with`, or `close()` it.

    Every method raises InvalidArgument, before anything is sent, for a wrong argument or option (None means not given),
    RequestRejected for a request that would be refused again, and NPUUnavailableError (of which
    DeadlineExceeded is one) when nobody could serve it; see `backend_client.errors`.
    """

    async def embed(self, text: str, **options: Unpack[EmbedOptions]) -> list[float]:
        """The vector of a text."""
        batch = await self._core.backend.embed(self._one_text("embed", text, options))
        vector: list[float] = batch.vectors[0].tolist()
        return vector

    async def embed_result(self, text: str, **options: Unpack[EmbedOptions]) -> EmbedResult:
        """The vector of a text, its vector space, and who made it."""
        batch = await self._core.backend.embed(self._one_text("embed_result", text, options))
        return EmbedResult(
            vector=batch.vectors[0].tolist(),
            space=batch.space,
            usage=batch.usage,
            **origin_fields(batch),
        )

    async def embed_batch(self, texts: Sequence[str], **options: Unpack[EmbedOptions]) -> EmbedBatch:
        """The vectors of a few texts in one request, and who made them. Raises PayloadTooLarge for too many."""
        given = self._given("embed_batch", options, EmbedOptions)
        return await self._core.backend.embed(self._embed_job(arguments.text_list(texts), given))

    async def embed_many(
        self, texts: Iterable[str], *, progress: Progress | None = None, **options: Unpack[EmbedOptions]
    ) -> npt.NDArray[np.float32]:
        """The vectors of any number of texts, float32 (n, d), in their order; see `embed_many_result`."""
        return (await self.embed_many_result(texts, progress=progress, **options)).vectors

    async def embed_many_result(
        self, texts: Iterable[str], *, progress: Progress | None = None, **options: Unpack[EmbedOptions]
    ) -> EmbedManyResult:
        """The vectors of any number of texts, in batches over all nodes, never of more than one vector space.

        `timeout` bounds the whole; without one each batch has the default time of a call. Raises EmbedManyFailed
        when some batches failed, with the vectors of the others; EmbedManyUnavailable, which is also an
        NPUUnavailableError, when that was for want of a node.
        """
        given = self._given("embed_many", options, EmbedOptions)
        arguments.plain_function(progress, "progress")
        # One deadline for all, made once; the batches get what remains of it when they start.
        whole = self._deadline(given, 0.0) if "timeout" in given else None

        async def embed(part: Sequence[str]) -> EmbedBatch:
            job = self._embed_job(part, given)
            return await self._core.backend.embed(job.within(whole) if whole else job)

        return await embed_in_batches(
            _checked(texts),
            embed,
            options=self._core.options.batch,
            concurrency=self._core.backend.concurrency(),
            probing=max(1, self._core.backend.concurrency() // self._core.options.batch.per_node),
            calls=self._core.calls,
            until=whole,
            progress=progress,
        )

    def embed_stream(
        self, texts: Iterable[str] | AsyncIterable[str], **options: Unpack[EmbedOptions]
    ) -> AsyncGenerator[EmbedBatch, None]:
        """Embed texts as they come, in constant memory: yields batches of vectors in the order of the texts.

        `texts` is read in a thread of its own, or in a task if it is asynchronous, so that only this stream waits for a
        slow source. `timeout` bounds each batch. An error of the source or of a batch is raised in its turn, when the
        vectors of all texts before it have been yielded.
        """
        given = self._given("embed_stream", options, EmbedOptions)

        async def embed(part: Sequence[str]) -> EmbedBatch:
            return await self._core.backend.embed(self._embed_job(part, given))

        batches = embed_windowed(
            _checked(texts),
            embed,
            options=self._core.options.batch,
            window=self._core.backend.concurrency(),
            calls=self._core.calls,
        )
        return OneLoop(batches)

    async def generate(self, prompt: str, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """The answer to a prompt."""
        return await self._core.backend.generate(self._generate_job("generate", prompt, options))

    def stream(self, prompt: str, **options: Unpack[GenerateOptions]) -> TokenStream:
        """The answer to a prompt, piece by piece: `async for piece in client.stream(prompt)`.

        Raises StreamInterrupted, which holds the text so far, when the answer stops after its first piece.
        """
        job = self._generate_job("stream", prompt, options)
        return TokenStream(lambda: self._core.backend.open_stream(job))

    def _one_text(self, method: str, text: str, options: EmbedOptions) -> EmbedJob:
        given = self._given(method, options, EmbedOptions)
        return self._embed_job([arguments.text(text, "text")], given)

    def _embed_job(self, texts: Sequence[str], given: Mapping[str, Any]) -> EmbedJob:
        common, others = split_options(given)
        return EmbedJob(
            texts=texts, deadline=self._deadline(given, self._core.options.timeouts.embed), **common, **others
        )

    def _generate_job(self, method: str, prompt: str, options: GenerateOptions) -> GenerateJob:
        given = self._given(method, options, GenerateOptions)
        deadline = self._deadline(given, self._core.options.timeouts.generate)
        common, sampling = split_options(given)
        return GenerateJob(prompt=arguments.text(prompt, "prompt"), deadline=deadline, sampling=sampling, **common)


def _checked(texts: Source) -> Source:
    """The texts, checked where all are there; others are checked as they are read."""
    return arguments.text_list(texts) if isinstance(texts, list | tuple) else texts
