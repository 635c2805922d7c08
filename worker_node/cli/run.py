"""`npu-node run MODEL ["prompt"]`: chat with a model in the terminal; `npu-node run --job`: see `bounded`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from worker_node.cli import bounded
from worker_node.cli.output import TOY_MODEL, TOY_NOTE, say
from worker_node.cli.serve import node_options
from worker_node.core.errors import ConfigurationError

if TYPE_CHECKING:
    from worker_node.cli.node_client import NodeClient

_DESCRIPTION = """Chat with a model in the terminal.

It talks to the running node (NPU_NODE_URL); a model that is not installed is pulled first.
Ctrl-C stops an answer; /bye or Ctrl-D ends the chat; lines between two \"\"\" are one message.
"""
_QUOTES = '"""'
_HELP = """/bye      end the chat (also Ctrl-D)
/clear    forget the messages so far
/?        this help
\"\"\"       begin and end a message of several lines
Ctrl-C    stop the answer"""


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="chat with a model in the terminal; run one bounded job",
        description=_DESCRIPTION,
        parents=[node_options()],
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="what npu-node pull takes")
    parser.add_argument("prompt", nargs="*", help="one message: answer it and end; standard input is added to it")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--verbose", action="store_true", help="after each answer: device, tokens and speed, on stderr")
    bounded.add_job_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Chat, answer one prompt, or run one bounded job; 0 when the answers came."""
    if (args.job is None) == (args.model is None) or (args.job is None) != (args.input is None):
        args.parser.error("takes a MODEL (npu-node list --all shows them), or --job with --input")
    if args.job is not None:
        return bounded.run_job(args)

    from worker_node.cli.node_client import model_path, node_or_none, where_no_node_runs

    with node_or_none(args) as node:
        if node is None:
            raise ConfigurationError(f"{where_no_node_runs()}; start one in another terminal: npu-node serve")
        chat = Chat(node, args.model, system=args.system, verbose=args.verbose)
        chat.prepare()
        # The arguments, and after these what is piped in.
        piped = None if sys.stdin.isatty() else sys.stdin.read()
        parts = [" ".join(args.prompt)] if args.prompt else []
        if piped is not None and (piped.strip() or not parts):
            parts.append(piped)
        if not parts:
            return converse(chat)
        prompt = "\n".join(parts)
        if not prompt.strip():
            node.call("POST", model_path(args.model, "load"))
            print(f"{args.model}: the prompt is empty, so the model is only loaded", file=sys.stderr)
            return 0
        return 0 if chat.answer(prompt) else 130


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
        self._write = write or partial(print, end="", flush=True)
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = list(self._start)
        self._embeds = self.is_toy = False

    def prepare(self) -> None:
        """Have the model on the node: pull it if it is not installed. Raises NodeCallFailed."""
        from worker_node.cli.node_client import NodeCallFailed, model_path
        from worker_node.cli.output import progress_display

        path = model_path(self.model)
        try:
            known = self._node.call("GET", path)
        except NodeCallFailed as error:
            if error.http_status != 404:
                raise
            with progress_display(self.model) as progress:
                self._node.pull(self.model, progress)
            known = self._node.call("GET", path)
        self._embeds = known.get("capabilities") == ["embedding"]
        self.is_toy = known.get("id") == TOY_MODEL

    def clear(self) -> None:
        self._messages = list(self._start)

    def answer(self, text: str) -> bool:
        """Write the answer to one message; False if Ctrl-C stopped it. Raises NodeCallFailed."""
        if self._embeds:
            answer = self._node.call("POST", "/embeddings", {"model": self.model, "texts": [text]})
            self._write(f"{answer['embeddings'][0]}\n")
            return True
        from worker_node.cli.node_client import NodeCallFailed

        self._messages.append({"role": "user", "content": text})
        parts: list[str] = []
        whole = True
        try:
            with self._node.lines("/api/chat", {"model": self.model, "messages": self._messages}) as lines:
                for line in lines:
                    if part := line.get("message", {}).get("content"):
                        parts.append(part)
                        self._write(part)
                    if line.get("done") and self._verbose:
                        _report(line)
        except KeyboardInterrupt:
            whole = False
        except NodeCallFailed:
            self._messages.pop()
            raise
        finally:
            self._write("\n")
        self._messages.append({"role": "assistant", "content": "".join(parts)})
        return whole


def _report(line: dict[str, Any]) -> None:
    seconds = line.get("eval_duration", 0) / 1e9
    device = f"{line['device']}: " if line.get("device") else ""
    speed = f", {line['eval_count'] / seconds:.1f} tokens/s" if seconds else ""
    counts = f"{line.get('prompt_eval_count', 0)} + {line.get('eval_count', 0)} tokens"
    print(f"\n[{device}{counts}{speed}]", file=sys.stderr)


def converse(chat: Chat, read: Callable[[str], str] = input) -> int:
    """Read messages and answer them until /bye or the end of the input; returns the exit status."""
    from worker_node.cli.node_client import NodeCallFailed

    with contextlib.suppress(ImportError):  # where Python was built without it
        import readline  # noqa: F401  (gives `input` arrow keys and a history)

    if chat.is_toy:
        print(TOY_NOTE, file=sys.stderr)
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
                print(f"{command} is not a command; /? lists them", file=sys.stderr)
            case _:
                try:
                    chat.answer(message)
                except NodeCallFailed as error:
                    say(error.message)
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
