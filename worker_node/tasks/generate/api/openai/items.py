"""The answer as the items of /v1/responses, and the events that report their growth."""

from __future__ import annotations

from typing import Any

from worker_node.core.types import Piece, Reasoning, Token, ToolCallArguments, ToolCallStarted
from worker_node.tasks.generate.api.openai.reply import new_id

Event = tuple[str, dict[str, Any]]


class Items:
    """Grows by pieces. Only the last item is open."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open = False

    def add(self, piece: Piece) -> list[Event]:
        """Add a piece; return the events that report it."""
        if isinstance(piece, ToolCallStarted):
            item = {"type": "function_call", "call_id": new_id("call_"), "name": piece.name, "arguments": ""}
            return [*self.end(), *self._begin("fc_", item)]
        if isinstance(piece, ToolCallArguments):
            self.output[-1]["arguments"] += piece.text
            return [self._event("response.function_call_arguments.delta", delta=piece.text)]
        events: list[Event] = []
        kind = "reasoning" if isinstance(piece, Reasoning) else "message"
        if not piece.text:
            return events
        if kind == "message" and not piece.text.strip() and self.output and self._last != "message":
            return events  # blanks around a call are no answer
        if not self._open or self._last != kind:
            events += self.end()
            events += self._begin_text(kind)
        part = self.output[-1]["content"][0]
        part["text"] += piece.text
        name = "response.output_text.delta" if isinstance(piece, Token) else "response.reasoning_text.delta"
        return [*events, self._event(name, content_index=0, delta=piece.text, **_no_logprobs(kind))]

    def end(self, status: str = "completed") -> list[Event]:
        """Close the open item, complete or cut."""
        if not self._open:
            return []
        self._open = False
        item = self.output[-1]
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "function_call":
            events.append(
                self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            )
        else:
            part = item["content"][0]
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            events.append(
                self._event(f"response.{name}.done", content_index=0, text=part["text"], **_no_logprobs(item["type"]))
            )
            events.append(self._event("response.content_part.done", content_index=0, part=dict(part)))
        return [*events, ("response.output_item.done", {"output_index": len(self.output) - 1, "item": dict(item)})]

    @property
    def _last(self) -> str:
        return str(self.output[-1]["type"]) if self.output else ""

    def _begin(self, prefix: str, item: dict[str, Any]) -> list[Event]:
        self.output.append({"id": new_id(prefix), "status": "in_progress", **item})
        self._open = True
        told = {"output_index": len(self.output) - 1, "item": dict(self.output[-1])}
        return [("response.output_item.added", told)]

    def _begin_text(self, kind: str) -> list[Event]:
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            events = self._begin("msg_", {"type": "message", "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            events = self._begin("rs_", {"type": "reasoning", "summary": [], "content": []})
        self.output[-1]["content"] = [part]
        return [*events, self._event("response.content_part.added", content_index=0, part=dict(part))]

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **fields}


def _no_logprobs(kind: str) -> dict[str, Any]:
    """A field that the events of an answer's text always have."""
    return {"logprobs": []} if kind == "message" else {}
