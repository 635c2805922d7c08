"""Answers that broke off, or are not what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backend_client.errors.base import NPUError
from backend_client.results import Attempt


class StreamInterrupted(NPUError):
    """A streamed answer stopped after its first token; it is neither retried nor taken over by the cloud.

    `partial_text` is what had arrived. It is kept out of the message and of the repr.
    """

    def __init__(
        self, message: str, *, partial_text: str = "", attempts: Sequence[Attempt] = (), request_id: str | None = None
    ) -> None:
        super().__init__(message, attempts=attempts, request_id=request_id)
        self.partial_text = partial_text

    @classmethod
    def after(
        cls, parts: Sequence[str], failed: NPUError, *, attempts: Sequence[Attempt], request_id: str
    ) -> StreamInterrupted:
        """The error for an answer that stopped after these parts because of `failed`."""
        text = "".join(parts)
        message = f"the answer stopped after {len(text)} characters: {failed.message}"
        return cls(message, partial_text=text, attempts=attempts, request_id=request_id)


class InvalidAnswer(NPUError):
    """An answer does not validate against the schema that it was asked to match.

    `text` is the answer, and `finish_reason` why it ended (length: it was cut). Neither is in the message or the repr.
    """

    def __init__(self, message: str, *, text: str = "", finish_reason: str = "", **more: Any) -> None:
        super().__init__(message, **more)
        self.text = text
        self.finish_reason = finish_reason
