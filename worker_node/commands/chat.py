"""A conversation in the terminal: reads messages, streams answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from worker_node.commands.node_client import NodeCallFailed, NodeClient, model_path
from worker_node.commands.progress import follow_pull, progress_display

_QUOTES = '"""'
_HELP = """/bye      end the chat (also Ctrl-D)
/clear    forget the messages so far
/?        this help
\"\"\"       begin and end a message of several lines
Ctrl-C    stop the answer"""


class Chat:
    """The messages so far, and the node that answers. `write` gets each piece of text as it comes."""

    def __init__(
        self,
        node: NodeClient,
        model: str,
        *,
        system: str | None = None,
        verbose: bool = False,
        write: Callable[[str], object] | None = None,
    ) -> None:
        self._node = node
        self.model = model
        self._verbose = verbose
        self._write = write or _print_at_once
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._start)
        self._embeds = False

    def prepare(self) -> None:
        """Have the model on the node: pull it if it is not installed. Raises NodeCallFailed."""
        path = model_path(self.model)
        try:
            known = self._node.get(path)
        except NodeCallFailed as error:
            if error.http_status != 404:
                raise
            with progress_display(self.model) as progress:
                follow_pull(self._node, self.model, progress)
            known = self._node.get(path)
        self._embeds = known.get("capabilities") == ["embedding"]

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self.messages = list(self._start)

    def answer(self, text: str) -> bool:
        """Write the answer to one message; False if Ctrl-C stopped it. Raises NodeCallFailed."""
        if self._embeds:
            return self._embed(text)
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        whole = True
        try:
            with self._node.lines("/api/chat", {"model": self.model, "messages": self.messages}) as lines:
                for line in lines:
                    if part := line.get("message", {}).get("content"):
                        parts.append(part)
                        self._write(part)
                    if line.get("done"):
                        self._report(line)
        except KeyboardInterrupt:
            whole = False
        except NodeCallFailed:
            self.messages.pop()
            raise
        finally:
            self._write("\n")
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        return whole

    def _embed(self, text: str) -> bool:
        vector = self._node.post("/embeddings", {"model": self.model, "texts": [text]})["embeddings"][0]
        self._write(f"{vector}\n")
        return True

    def _report(self, line: dict[str, Any]) -> None:
        if not self._verbose:
            return
        seconds = line.get("eval_duration", 0) / 1e9
        speed = f", {line['eval_count'] / seconds:.1f} tokens/s" if seconds else ""
        print(
            f"\n[{line.get('device', 'unknown device')}: {line.get('prompt_eval_count')} + {line.get('eval_count')} "
            f"tokens{speed}]",
            file=sys.stderr,
        )


def converse(chat: Chat, read: Callable[[str], str] = input) -> int:
    """Read messages and answer them until /bye or the end of the input; returns the exit status."""
    _line_editing()
    print(f"{chat.model}: /? for help, /bye to end", file=sys.stderr)
    while (message := _next_message(read)) is not None:
        match message.strip():
            case "":
                continue
            case "/bye" | "/exit" | "/quit":
                break
            case "/clear":
                chat.clear()
            case "/?" | "/help":
                print(_HELP, file=sys.stderr)
            case command if command.startswith("/") and " " not in command and "\n" not in command:
                print(f"{command} is no command; /? lists them", file=sys.stderr)
            case _:
                try:
                    chat.answer(message)
                except NodeCallFailed as error:
                    print(f"npu-node: {error.message}", file=sys.stderr)
    return 0


def _next_message(read: Callable[[str], str]) -> str | None:
    """The next line, or the lines between two `\"\"\"`; None at the end of the input."""
    try:
        line = read(">>> ")
        if not line.startswith(_QUOTES):
            return line
        line = line.removeprefix(_QUOTES)
        lines = [] if not line else [line]
        while not (lines and lines[-1].endswith(_QUOTES)):
            lines.append(read("... "))
        lines[-1] = lines[-1].removesuffix(_QUOTES)
        return "\n".join(lines)
    except EOFError:
        return None
    except KeyboardInterrupt:
        print("\n/bye or Ctrl-D ends the chat", file=sys.stderr)
        return ""


def _line_editing() -> None:
    """Arrow keys and a history at the prompt, where Python was built with it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() uses it once it is imported)


def _print_at_once(text: str) -> None:
    print(text, end="", flush=True)
