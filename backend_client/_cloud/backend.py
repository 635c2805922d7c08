"""The cloud as a backend: one attempt, within the call's deadline and the spend cap."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from backend_client._cloud.attempt import CloudAttempt, CloudState
from backend_client._cloud.exchanges import CloudExchanges
from backend_client._cloud.reply import NotAnAnswer, reading, text_in, usage_in
from backend_client._cloud.streams import CloudReading, follow
from backend_client._protocol.jobs import Answer, EmbedJob, EventStream, Exchange, GenerateJob, Job
from backend_client._protocol.names import plain_name
from backend_client._protocol.report import ModelReport
from backend_client._resilience.breaker import Breaker
from backend_client._resilience.deadline import Deadline
from backend_client._resilience.loop_end import before_loop_ends
from backend_client.errors import CloudRejected
from backend_client.results import EmbedBatch, GenerateResult, RawReply, Timing, Usage
from backend_client.settings import CloudSettings

# No tokenizer makes more than one token of a byte; a chat template and special tokens add a few.
_TEMPLATE_TOKENS = 64
_SPECIAL_TOKENS = 4
_CONCURRENCY = 8

# What a stream yields at its end: the finish reason, and the usage if it was reported.
_End = tuple[str, Usage | None]
_READING: CloudReading[str | _End] = CloudReading(
    ends=lambda item: not isinstance(item, str),
    text=lambda item: item if isinstance(item, str) else "",
    usage=lambda item: None if isinstance(item, str) else item[1],
)


class CloudBackend:
    """Embeds and generates in the cloud. Each event loop and each forked child has connections of its own."""

    def __init__(self, settings: CloudSettings, state: CloudState) -> None:
        self._settings = settings
        self._state = state
        self._spaces = {model: space for space, model in settings.embedding_models.items()}
        self._chat_models = {plain_name(name): model for name, model in settings.chat_models.items()}
        # Made here and not by the first call: reading the certificates and importing the SDK's parts block for 100 ms
        # and more, which the deadline of a call and the service's event loop cannot afford.
        self._sdk = _sdk(settings)
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._used = False
        self._end: asyncio.Task[None] | None = None
        self._exchanges = CloudExchanges(settings, self._client, self._attempt)

    @property
    def spaces(self) -> Collection[str]:
        """The vector spaces that it has a model for."""
        return self._settings.embedding_models

    @property
    def breaker(self) -> Breaker:
        """Whether it is ejected after failures."""
        return self._state.breaker

    def chat_model_for(self, name: str | None) -> str | None:
        """The cloud's model for one of the fleet (None: the fleet's default); None when none is declared for it."""
        return self._settings.chat_model if name is None else self._chat_models.get(plain_name(name))

    def refusal(self, job: Job) -> str | None:
        """Why the cloud cannot serve a job, or None."""
        if isinstance(job, EmbedJob):
            return self._embedding_refusal(job)
        if isinstance(job, GenerateJob):
            return self._chat_refusal(job)
        if isinstance(job, Exchange):
            return self._exchanges.refusal(job)
        return "it serves embeddings and generation only"

    def concurrency(self) -> int:
        """Batches of one `embed_many` that may be under way."""
        return _CONCURRENCY

    async def close(self) -> None:
        """End all calls, then close the SDK's connections."""
        await self._state.calls.close()
        if self._end is not None and self._loop is asyncio.get_running_loop():
            self._end.cancel()
            await asyncio.gather(self._end, return_exceptions=True)
        await self._sdk.close()

    async def embed(self, job: EmbedJob) -> EmbedBatch:
        """Embed with the model that is mapped to the job's space. Raises CloudError."""
        model = self._embedding_model(job)
        bound = sum(len(text.encode(errors="replace")) + _SPECIAL_TOKENS for text in job.texts)
        attempt = self._attempt(job, model, Usage(bound))
        vectors, usage = await attempt.run(self._embed(job, model))
        attempt.succeeded(usage)
        return EmbedBatch(
            vectors=vectors,
            space=job.space or self._spaces[model],
            usage=usage or attempt.bound,
            **self._origin(attempt),
        )

    async def generate(self, job: GenerateJob) -> GenerateResult:
        """Answer with the chat model. Raises CloudError."""
        attempt = self._chat_attempt(job)
        text, (reason, usage) = await attempt.run(self._complete(attempt))
        attempt.succeeded(usage)
        return self._generated(attempt, text, reason, usage)

    async def open_stream(self, job: GenerateJob, opened_by: Deadline | None = None) -> Answer:
        """Open a stream; returns with its first piece. Raises CloudError."""
        attempt = self._chat_attempt(job)
        pieces = self._pieces(attempt)
        first = await attempt.run(anext(pieces), opened_by)
        return self._answer(attempt, pieces, first)

    async def exchange(self, job: Exchange) -> RawReply:
        """A chat in OpenAI's dialect. Raises CloudError."""
        return await self._exchanges.exchange(job)

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """The same as a stream. Raises CloudError."""
        return await self._exchanges.open_exchange(job, opened_by)

    async def models(self) -> list[ModelReport]:
        """None: its models are those of the settings."""
        return []

    async def _answer(
        self, attempt: CloudAttempt, pieces: AsyncGenerator[str | _End, None], item: str | _End
    ) -> Answer:
        parts: list[str] = []
        items = follow(attempt, pieces, item, _READING)
        try:
            async for found in items:
                if isinstance(found, str):
                    parts.append(found)
                    yield found
                else:
                    yield self._generated(attempt, "".join(parts), *found)
        finally:
            await items.aclose()

    async def _embed(self, job: EmbedJob, model: str) -> tuple[npt.NDArray[np.float32], Usage | None]:
        reply = await self._client(job).embeddings.create(model=model, input=list(job.texts), encoding_format="float")
        with reading("no list of embeddings"):
            rows = sorted(reply.data, key=lambda row: row.index)
            vectors = np.asarray([row.embedding for row in rows], np.float32)
            usage = usage_in(reply.usage, embedding=True)
        whole = vectors.ndim == 2 and vectors.shape[1] > 0 and [row.index for row in rows] == [*range(len(job.texts))]
        if not whole or not np.isfinite(vectors).all():
            raise NotAnAnswer("not one vector of numbers for each text")
        if not vectors.any(axis=1).all():
            raise NotAnAnswer("a vector is all zeros, which has no direction")
        if job.dimensions is not None and vectors.shape[1] != job.dimensions:
            raise NotAnAnswer(f"vectors of {vectors.shape[1]} dimensions, their space has {job.dimensions}")
        return vectors, usage

    async def _complete(self, attempt: CloudAttempt) -> tuple[str, _End]:
        reply = await self._client(attempt.job).chat.completions.create(**self._chat(attempt))
        with reading("no chat completion"):
            choice = reply.choices[0]
            return text_in(choice.message.content), (text_in(choice.finish_reason), usage_in(reply.usage))

    async def _pieces(self, attempt: CloudAttempt) -> AsyncGenerator[str | _End, None]:
        reason, usage = "", None
        async with await self._client(attempt.job).chat.completions.create(
            **self._chat(attempt), stream=True, stream_options={"include_usage": True}
        ) as stream:
            async for chunk in stream:
                piece = None
                with reading("no part of a chat completion"):
                    usage = usage_in(chunk.usage) or usage
                    for choice in chunk.choices[:1]:
                        reason = text_in(choice.finish_reason) or reason
                        piece = text_in(choice.delta.content)
                if piece:
                    yield piece
        if not reason:
            raise NotAnAnswer("a stream that ended before the answer did")
        yield reason, usage

    def _client(self, job: Job) -> AsyncOpenAI:
        if os.getpid() != self._pid:
            # A forked child: the connections are the parent's.
            self._pid, self._inherited, self._sdk = os.getpid(), self._sdk, _sdk(self._settings)
            self._loop, self._used = None, False
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._used:
                self._sdk = _sdk(self._settings)
            self._loop, self._used, sdk = loop, True, self._sdk
            self._end = before_loop_ends(lambda: self._loop_ends(sdk), "connections to the cloud")
        return self._sdk.with_options(timeout=job.deadline.remaining(), default_headers=dict(job.extra_headers) or None)

    async def _loop_ends(self, sdk: AsyncOpenAI) -> None:
        if sdk is self._sdk:
            self._loop = None
        await sdk.close()

    def _attempt(self, job: Job, model: str, bound: Usage) -> CloudAttempt:
        refusal = self.refusal(job)
        if refusal is not None:
            raise CloudRejected(f"the cloud cannot serve this: {refusal}", node=self._state.name)
        return CloudAttempt(self._state, job, model, bound)

    def _chat_attempt(self, job: GenerateJob) -> CloudAttempt:
        bound = Usage(len(job.prompt.encode(errors="replace")) + _TEMPLATE_TOKENS, self._max_tokens(job))
        return self._attempt(job, job.model or self._settings.chat_model or "", bound)

    def _chat(self, attempt: CloudAttempt) -> dict[str, Any]:
        """The parameters of the chat request. Raises nothing: `_chat_refusal` has let it through."""
        job = attempt.job
        if not isinstance(job, GenerateJob):
            raise TypeError(f"{type(job).__name__} is not for the chat API")
        given = job.sampling
        # OpenAI's newer models refuse max_tokens; servers that speak its API may know nothing else.
        limit = "max_tokens" if self._settings.base_url else "max_completion_tokens"
        chat: dict[str, Any] = {
            "model": attempt.model,
            "messages": [{"role": "user", "content": job.prompt}],
            limit: self._max_tokens(job),
        }
        chat |= {name: given[name] for name in ("temperature", "top_p", "stop", "seed") if name in given}
        if "top_k" in given:
            chat["extra_body"] = {"top_k": given["top_k"]}
        return chat

    def _max_tokens(self, job: GenerateJob) -> int:
        return max(0, int(job.sampling.get("max_new_tokens", self._settings.max_tokens)))

    def _chat_refusal(self, job: GenerateJob) -> str | None:
        if not (job.model or self._settings.chat_model):
            return "cloud.chat_model is not set"
        if job.sampling.get("raw"):
            return "it applies its own chat template, and the prompt is raw"
        if "top_k" in job.sampling and not self._settings.base_url:
            return "OpenAI has no top_k"
        return None

    def _embedding_refusal(self, job: EmbedJob) -> str | None:
        if job.truncate and not _fits(job):
            return "it cannot truncate as the nodes do (truncate=True)"
        if job.input_type is not None:
            return "it does not know the prompts of the nodes' model (input_type)"
        if job.space is None and job.dimensions is not None:
            return "it does not cut vectors as the nodes do (dimensions)"
        if self._embedding_model(job):
            return None
        if job.space is None:
            return "name one of the models of cloud.embedding_models"
        return f"no cloud model is declared for the vector space {job.space} (cloud.embedding_models)"

    def _embedding_model(self, job: EmbedJob) -> str:
        """The mapped model; for a caller of the cloud itself, who names no space, the one that is named or the only
        one.
        """
        if job.space is not None:
            return self._settings.embedding_models.get(job.space, "")
        if job.model in self._spaces:
            return job.model or ""
        return next(iter(self._spaces)) if job.model is None and len(self._spaces) == 1 else ""

    def _origin(self, attempt: CloudAttempt) -> dict[str, Any]:
        return {
            "source": "cloud",
            "node": self._state.name,
            "model": attempt.model,
            "device": None,
            "request_id": attempt.job.request_id,
            "attempts": (attempt.record("ok", 200),),
        }

    def _generated(self, attempt: CloudAttempt, text: str, reason: str, usage: Usage | None) -> GenerateResult:
        return GenerateResult(
            text=text, finish_reason=reason, usage=usage or attempt.bound, timing=Timing(), **self._origin(attempt)
        )


def _sdk(settings: CloudSettings) -> AsyncOpenAI:
    sdk = AsyncOpenAI(
        api_key=settings.api_key.get_secret_value(),
        base_url=settings.base_url,
        # One loop retries, ours.
        max_retries=0,
        # What is sent there is not to go anywhere else.
        http_client=DefaultAsyncHttpxClient(follow_redirects=False),
    )
    # The SDK imports these when they are first asked for.
    _ = sdk.embeddings, sdk.chat.completions
    return sdk


def _fits(job: EmbedJob) -> bool:
    """Whether no text can be too long for the model, so that there is nothing to truncate."""
    limit = job.context_limit
    return limit is not None and all(len(text.encode()) + _SPECIAL_TOKENS <= limit for text in job.texts)
