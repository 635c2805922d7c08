"""The methods of a client for reranking and transcription."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from typing import Any, Unpack

from backend_client._api import arguments
from backend_client._api.chat_reply import origin_fields
from backend_client._api.client_base import ClientBase
from backend_client._api.recordings import Audio, form_value, read_recording, transcription_fields
from backend_client._protocol.jobs import Exchange, split_options
from backend_client.errors import DeadlineExceeded, InvalidArgument
from backend_client.results import RankedDocument, RerankOptions, RerankResult, TranscribeOptions, Transcription

_LARGEST = sys.float_info.max


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
        most = body.get("top_n", len(texts))
        reply = await self._exchange(
            "/v1/rerank",
            body,
            given,
            self._core.options.timeouts.embed,
            kind="rerank",
            check=lambda found: _ranked(found, texts, most) is not None,
        )
        ranked = _ranked(reply.body, texts, most) or ()
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
            check=lambda found: transcription_fields(found) is not None,
            **common,
        )
        reply = await self._core.backend.exchange(job)
        return Transcription(**(transcription_fields(reply.body) or {}), **origin_fields(reply))


def _ranked(body: Any, texts: Sequence[str], most: int) -> tuple[RankedDocument, ...] | None:
    """The documents of a reply, the most relevant first; None for what is no ranking of the texts."""
    rows = body.get("results") if isinstance(body, dict) else None
    if not isinstance(rows, list) or len(rows) != min(most, len(texts)):
        return None
    ranked: dict[int, RankedDocument] = {}
    for row in rows:
        index = row.get("index") if isinstance(row, dict) else None
        score = row.get("relevance_score") if isinstance(row, dict) else None
        if type(index) is not int or not 0 <= index < len(texts):
            return None
        if isinstance(score, bool) or not isinstance(score, int | float):
            return None
        # A number without end is no float, nor is NaN a score.
        if abs(score) > _LARGEST or math.isnan(score):
            return None
        ranked[index] = RankedDocument(index, float(score), texts[index])
    if len(ranked) != len(rows):
        return None
    return tuple(sorted(ranked.values(), key=lambda document: -document.score))
