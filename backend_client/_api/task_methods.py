"""The methods of a client for reranking and transcription."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Unpack

from backend_client._api import arguments
from backend_client._api.client_base import ClientBase
from backend_client._api.recordings import Audio, form_value, read_recording
from backend_client._protocol.answers import ranking_in, transcription_in
from backend_client._protocol.jobs import Exchange, split_options
from backend_client.errors import DeadlineExceeded, InvalidArgument
from backend_client.results import RankedDocument, RerankOptions, RerankResult, TranscribeOptions, Transcription
from backend_client.results.origin import origin_fields


class TaskMethods(ClientBase):
    """Reranking and transcription. The nodes' reports of their models say who offers them."""

    async def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]) -> RerankResult:
        """The documents by their relevance to the query, the most relevant first.

        Raises NotOffered, before anything is sent, where no node has a model for it.
        """
        given = self._given("rerank", options, RerankOptions)
        texts = arguments.text_list(documents, "documents")
        if not texts:
            raise InvalidArgument("documents is empty: there is nothing to rank", param="documents")
        body: dict[str, Any] = {"query": arguments.text(query, "query"), "documents": texts}
        for name in ("top_n", "max_tokens_per_doc"):
            if name in given:
                body[name] = given.pop(name)
        reply = await self._exchange("/v1/rerank", body, given, self._core.options.timeouts.embed, kind="rerank")
        scores = ranking_in(reply.body, len(texts), body.get("top_n", len(texts)))
        scores.sort(key=lambda scored: -scored[1])
        ranked = tuple(RankedDocument(index, score, texts[index]) for index, score in scores)
        return RerankResult(documents=ranked, usage=reply.usage, **origin_fields(reply))

    async def transcribe(self, audio: Audio, **options: Unpack[TranscribeOptions]) -> Transcription:
        """The text of a recording: a file's path, its bytes, or a file opened in binary mode (read to its end).

        The deadline includes the reading. The recording is held in memory, and sent again where a node fails before
        its reply. Raises NotOffered, before anything is sent, where no node has a model for it.
        """
        given = self._given("transcribe", options, TranscribeOptions)
        common, fields = split_options(given)
        deadline = self._deadline(given, self._core.options.timeouts.generate)
        try:
            async with asyncio.timeout(deadline.remaining()):
                name, content = await read_recording(audio)
        except TimeoutError:
            name, content = "", None
        if content is None:
            raise DeadlineExceeded("the call's time was up before the recording was read; increase `timeout`")
        granularities = fields.pop("timestamp_granularities", None)
        body: dict[str, Any] = {"response_format": "verbose_json"}
        body |= {field: form_value(value, field) for field, value in fields.items()}
        if granularities is not None:
            body["timestamp_granularities[]"] = arguments.words(
                granularities, "timestamp_granularities", ("word", "segment")
            )
        job = Exchange(
            path="/v1/audio/transcriptions",
            kind="transcription",
            deadline=deadline,
            body=body,
            file=(name, content),
            **common,
        )
        reply = await self._core.backend.exchange(job)
        return Transcription(**transcription_in(reply.body), **origin_fields(reply))
