"""The cloud as a backend: one attempt, within the call's deadline and the spend cap."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from backend_client._cloud.attempt import CloudAttempt, CloudState
from backend_client._cloud.exchanges import CloudExchanges
from backend_client._cloud.reply import check_model, usage_in
from backend_client._protocol.answers import NotAnAnswer, Vectors, choices_in, read_json, reading, vectors_in
from backend_client._protocol.jobs import Answer, EmbedJob, EventStream, Exchange, GenerateJob, Job
from backend_client._protocol.names import plain_name
from backend_client._protocol.report import ModelReport
from backend_client._protocol.sdk_http import httpx
from backend_client._resilience.breaker import Breaker
from backend_client._resilience.deadline import Deadline
from backend_client._resilience.loop_end import before_loop_ends
from backend_client.errors import CloudRejected
from backend_client.results import EmbedBatch, GenerateResult, RawReply, Timing, Usage
from backend_client.results.origin import origin_fields
from backend_client.settings import CloudSettings

# No tokenizer makes more than one token of a byte; special tokens add a few.
_SPECIAL_TOKENS = 4
_CONCURRENCY = 8


class CloudBackend:
    """Embeds and generates in the cloud. Each event loop and each forked child has connections of its own."""

    def __init__(self, settings: CloudSettings, state: CloudState) -> None:
        self._settings = settings
        self._state = state
        self._spaces = {model: space for space, model in settings.embedding_models.items()}
        self._headers = {name.lower() for name in settings.extra_headers}
        self._dimensions: dict[str, int] = {}
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
        if job.local_only:
            return "local_only is set"
        if job.require_device is not None:
            return f"the call requires the device {job.require_device}"
        if isinstance(job, EmbedJob):
            return self._embedding_refusal(job)
        if isinstance(job, GenerateJob):
            raw = "it applies its own chat template, and the prompt is raw" if job.sampling.get("raw") else None
            return raw or self._exchanges.refusal(_chat(job))
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
        vectors, usage = await attempt.run(self._embed(job, attempt))
        attempt.succeeded(usage)
        return EmbedBatch(
            vectors=vectors,
            space=job.space or self._spaces[model],
            usage=usage or attempt.bound,
            **self._origin(attempt),
        )

    async def generate(self, job: GenerateJob) -> GenerateResult:
        """Answer with the chat model. Raises CloudError."""
        self._check(job)
        reply = await self._exchanges.exchange(_chat(job))
        choice = choices_in(reply.body)[0]
        return _generated(reply, choice.text, choice.finish_reason)

    async def open_stream(self, job: GenerateJob, opened_by: Deadline | None = None) -> Answer:
        """Open a stream; returns when the answer has begun. Raises CloudError."""
        self._check(job)
        return _answer(await self._exchanges.open_exchange(_chat(job), opened_by))

    async def exchange(self, job: Exchange) -> RawReply:
        """A chat in OpenAI's dialect. Raises CloudError."""
        return await self._exchanges.exchange(job)

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """The same as a stream. Raises CloudError."""
        return await self._exchanges.open_exchange(job, opened_by)

    async def models(self) -> list[ModelReport]:
        """None: its models are those of the settings."""
        return []

    async def _embed(self, job: EmbedJob, attempt: CloudAttempt) -> tuple[Vectors, Usage | None]:
        model = attempt.model
        body = {"model": model, "input": list(job.texts), "encoding_format": "float"}
        response = await self._client(job).post("/embeddings", cast_to=httpx.Response, body=body)
        found = read_json(response.content)
        with reading("no list of embeddings"):
            # Their order is in `index`, and nowhere else.
            found["data"] = sorted(found["data"], key=lambda row: row["index"])
        vectors = vectors_in(found, len(job.texts))
        check_model(model, found)
        dimensions, space = vectors.shape[1], job.space or self._spaces[model]
        if dimensions != (job.dimensions or self._dimensions.setdefault(space, dimensions)):
            known = job.dimensions or self._dimensions[space]
            raise NotAnAnswer(f"vectors of {dimensions} dimensions, those of their space have {known}")
        return vectors, usage_in(found, attempt.bound)

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
        headers = {name: value for name, value in job.extra_headers.items() if name.lower() in self._headers}
        return self._sdk.with_options(timeout=job.deadline.remaining(), default_headers=headers or None)

    async def _loop_ends(self, sdk: AsyncOpenAI) -> None:
        if sdk is self._sdk:
            self._loop = None
        await sdk.close()

    def _attempt(self, job: Job, model: str, bound: Usage) -> CloudAttempt:
        self._check(job)
        return CloudAttempt(self._state, job, model, bound)

    def _check(self, job: Job) -> None:
        refusal = self.refusal(job)
        if refusal is not None:
            raise CloudRejected(f"the cloud cannot serve this: {refusal}", node=self._state.name)

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


def _chat(job: GenerateJob) -> Exchange:
    """The prompt as a chat of one message."""
    given = {{"max_new_tokens": "max_tokens"}.get(name, name): value for name, value in job.sampling.items()}
    common = {part.name: getattr(job, part.name) for part in fields(Job)}
    return Exchange(
        path="/v1/chat/completions", body={"messages": [{"role": "user", "content": job.prompt}], **given}, **common
    )


def _generated(reply: RawReply, text: str, reason: str) -> GenerateResult:
    return GenerateResult(text=text, finish_reason=reason, usage=reply.usage, timing=Timing(), **origin_fields(reply))


async def _answer(events: EventStream) -> Answer:
    parts: list[str] = []
    reason = ""
    try:
        async for item in events:
            if isinstance(item, RawReply):
                yield _generated(item, "".join(parts), reason)
            else:
                reason = item.finish_reason or reason
                if item.text:
                    parts.append(item.text)
                    yield item.text
    finally:
        await events.aclose()


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
