"""A chat answer in chunks, and as a whole message."""

from __future__ import annotations

from typing import Any

from worker_node.core.types import Finished, Piece, Reasoning, Token, ToolCallStarted
from worker_node.tasks.generate.api.openai.logprobs import chat_logprobs
from worker_node.tasks.generate.api.openai.reply import WholeAnswer, new_id


class ChatChunks:
    """See `ChunkRenderer`."""

    kind = "chat.completion.chunk"

    def __init__(self, top_logprobs: int) -> None:
        self._top = top_logprobs

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The first chunk of a choice."""
        return [_chunk(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a choice."""
        if isinstance(piece, Token):
            part = _chunk(index, {"content": piece.text})
            if piece.logprobs:
                part["logprobs"] = chat_logprobs(piece.logprobs, self._top)
            return [part]
        if isinstance(piece, Reasoning):
            return [_chunk(index, {"reasoning_content": piece.text})]
        call: dict[str, Any] = {"index": piece.call}
        if isinstance(piece, ToolCallStarted):
            call |= {"id": new_id("call_"), "type": "function", "function": {"name": piece.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": piece.text}
        return [_chunk(index, {"tool_calls": [call]})]

    def closing(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        """The last chunk of a choice."""
        return [_chunk(index, {}, finished.finish_reason)]


def whole_message(outcome: WholeAnswer) -> dict[str, Any]:
    """The message of a finished choice."""
    message: dict[str, Any] = {
        "role": "assistant",
        # With calls and no words there is no content, not an empty one.
        "content": None if outcome.calls and not outcome.text.strip() else outcome.text,
        "refusal": None,
    }
    if outcome.reasoning:
        message["reasoning_content"] = outcome.reasoning
    if outcome.calls:
        message["tool_calls"] = [
            {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in outcome.calls
        ]
    return message


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
