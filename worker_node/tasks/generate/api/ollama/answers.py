"""The answers of /api/generate and /api/chat in frames, one for each piece, or as one whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

from worker_node.api.ollama.frames import Loading, ending, frame
from worker_node.core.types import Finished, Piece, Reasoning, Token, ToolCallArguments, ToolCallStarted


class Frames(ABC):
    """Renders one answer. `model` is the name that the client used."""

    def __init__(self, model: str, loading: Loading) -> None:
        self._model = model
        self._loading = loading
        self._text = ""
        self._thinking = ""
        self._calls: list[tuple[str, str]] = []
        self._sent = 0

    @abstractmethod
    def _answer(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields that hold a part of the answer."""

    def add(self, piece: Piece) -> None:
        """One more piece has come."""
        if isinstance(piece, Token):
            self._text += piece.text
        elif isinstance(piece, Reasoning):
            self._thinking += piece.text
        elif isinstance(piece, ToolCallStarted):
            self._calls.append((piece.name, ""))
        else:
            name, arguments = self._calls[piece.call]
            self._calls[piece.call] = (name, arguments + piece.text)

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        """The frame for a piece; a call makes one when it is complete."""
        if isinstance(piece, ToolCallArguments):
            self.add(piece)
            return None
        if isinstance(piece, ToolCallStarted):
            done = self._complete()
            self.add(piece)
            return done
        text, thinking = (piece.text, "") if isinstance(piece, Token) else ("", piece.text)
        return frame(self._model, **self._answer(text, thinking, []), done=False)

    def last(self, finished: Finished) -> list[dict[str, Any]]:
        """The frames at the end."""
        done = self._complete()
        final = frame(self._model, **self._answer("", "", []), **ending(finished, self._loading))
        return [final] if done is None else [done, final]

    def whole(self, finished: Finished) -> dict[str, Any]:
        """The reply as one object."""
        calls = _rendered(self._calls)
        text = self._text if self._calls == [] or self._text.strip() else ""
        return frame(self._model, **self._answer(text, self._thinking, calls), **ending(finished, self._loading))

    def _complete(self) -> dict[str, Any] | None:
        """The frame for the calls that are complete and not sent."""
        new, self._sent = self._calls[self._sent :], len(self._calls)
        calls = _rendered(new)
        return frame(self._model, **self._answer("", "", calls), done=False) if calls else None


class Generated(Frames):
    """Frames of /api/generate."""

    def _answer(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class Chatted(Frames):
    """Frames of /api/chat."""

    def _answer(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            turn["thinking"] = thinking
        if calls:
            turn["tool_calls"] = calls
        return {"message": turn}


def _rendered(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Calls with their arguments as objects; one that was cut in the middle has none and is left out."""
    rendered: list[dict[str, Any]] = []
    for name, text in calls:
        try:
            arguments = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        rendered.append({"function": {"name": name, "arguments": arguments}})
    return rendered
