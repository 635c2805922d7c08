"""The stream of a transcription: a delta for each stretch of speech, then the whole text. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backend_client._protocol.answers import NotAnAnswer
from backend_client._protocol.dialect import Read, StreamEvent

_DELTA, _DONE = "transcript.text.delta", "transcript.text.done"


class TranscriptForm:
    """Events of /v1/audio/transcriptions with `stream`; events of other types are handed on."""

    def reader(self, request: Mapping[str, Any]) -> Read:  # noqa: ARG002  (all are read alike)
        """The text of a delta, and the whole one, are text."""
        return _read

    def begins(self, event: StreamEvent) -> bool:
        """A delta, or the whole text of a recording without speech."""
        return event.data is not None and event.data.get("type") in {_DELTA, _DONE}

    def ends(self, event: StreamEvent) -> bool:
        """The whole text: a form has no `[DONE]` after it."""
        return event.data is not None and event.data.get("type") == _DONE

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The form as it is: it asks for the stream."""
        return dict(body)

    def whole(self, events: Sequence[StreamEvent]) -> dict[str, Any]:
        """The text, as a reply without a stream has it."""
        return {"text": (events[-1].data or {})["text"]}


def _read(event: StreamEvent) -> StreamEvent:
    data = event.data or {}
    name = {_DELTA: "delta", _DONE: "text"}.get(str(data.get("type")))
    if name is not None and not isinstance(data.get(name), str):
        raise NotAnAnswer("a part of the transcription is not text")
    return event


TRANSCRIPTS = TranscriptForm()
