"""`npu-node run MODEL ["prompt"]`: chat with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

from worker_node.cli import bounded
from worker_node.core.errors import ConfigurationError

if TYPE_CHECKING:
    from worker_node.cli.node_client import NodeClient

_DESCRIPTION = """Chat with a model in the terminal.

It talks to the running node (NPU_NODE_URL), or starts one for as long as the chat lasts; a model that is not installed
is pulled first. Ctrl-C stops an answer; /bye or Ctrl-D ends the chat; lines between two \"\"\" are one message.
"""
_QUOTES = '"""'
_HELP = """/bye      end the chat (also Ctrl-D)
/clear    forget the messages so far
/?        this help
\"\"\"       begin and end a message of several lines
Ctrl-C    stop the answer"""
_STOP_S = 10.0
_LOG_TAIL = 600
# It listens on loopback for this user's command alone.
_OF_A_SERVICE = ("NPU_NODE_API_KEYS", "NPU_NODE_API_KEYS_FILE", "NPU_NODE_OLLAMA_PORT", "NPU_NODE_PORT")


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand, and the options of the bounded job that it once was."""
    parser = commands.add_parser("run", help="chat with a model in the terminal", description=_DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="what npu-node pull takes")
    parser.add_argument("prompt", nargs="*", help="one message: answer it and end; standard input is added to it")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--verbose", action="store_true", help="after each answer: device, tokens and speed, on stderr")
    bounded.add_job_options(parser, required=False)
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    """Chat, or answer one prompt; 0 when the answers came."""
    if args.job is not None or args.input is not None:
        if args.job is None or args.input is None or args.model is not None:
            args.parser.error("a bounded job has --job and --input and no model; see: npu-node job --help")
        return bounded.run_job(args)
    if args.model is None:
        args.parser.error("name a model, see: npu-node list --all")

    with _node() as node:
        chat = Chat(node, args.model, system=args.system, verbose=args.verbose)
        chat.prepare()
        prompt = _whole_prompt(args.prompt)
        if prompt is None:
            return converse(chat)
        return 0 if chat.answer(prompt) else 130


@contextlib.contextmanager
def _node() -> Iterator[NodeClient]:
    from worker_node.cli.node_client import node_or_none

    with node_or_none() as running:
        if running is not None:
            yield running
            return
        print("npu-node: no node is running; starting one for this chat", file=sys.stderr)
        with _own_node() as node:
            yield node


@contextlib.contextmanager
def _own_node() -> Iterator[NodeClient]:
    """A node on a free loopback port that loads models on demand; it ends with the block, or with this process.

    Raises ConfigurationError, with the end of its log, when it does not start.
    """
    from worker_node.cli.node_client import NodeClient
    from worker_node.core.operating_system import tethered

    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_SERVICE}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603 (our own program)
            tethered([sys.executable, "-m", "worker_node", "serve", "--host", "127.0.0.1", "--port", "0"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment | {"NPU_NODE_MODELS": "[]"},
            # Ctrl-C in the terminal stops an answer, not the node.
            start_new_session=True,
        )
        try:
            client = NodeClient(_address(process, log))
            try:
                yield client
            finally:
                client.close()
        finally:
            _stop(process)


def _address(process: subprocess.Popen[str], log: IO[bytes]) -> str:
    assert process.stdout is not None  # noqa: S101  (it was asked for)
    line = process.stdout.readline()
    if not line.startswith("listening on "):
        process.wait()
        log.seek(0)
        tail = log.read().decode(errors="replace")[-_LOG_TAIL:].strip()
        raise ConfigurationError(f"the node for this chat did not start: {tail or 'its log is empty'}")
    return line.split()[-1]


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _whole_prompt(words: list[str]) -> str | None:
    """The arguments, and after these what is piped in; None when there is neither."""
    parts = [" ".join(words)] if words else []
    if not sys.stdin.isatty() and (piped := sys.stdin.read()).strip():
        parts.append(piped)
    if not parts and not sys.stdin.isatty():
        return ""
    return "\n".join(parts) if parts else None


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
        from worker_node.cli.node_client import NodeCallFailed, model_path
        from worker_node.cli.output import progress_display

        path = model_path(self.model)
        try:
            known = self._node.get(path)
        except NodeCallFailed as error:
            if error.http_status != 404:
                raise
            with progress_display(self.model) as progress:
                self._node.pull(self.model, progress)
            known = self._node.get(path)
        self._embeds = known.get("capabilities") == ["embedding"]

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self.messages = list(self._start)

    def answer(self, text: str) -> bool:
        """Write the answer to one message; False if Ctrl-C stopped it. Raises NodeCallFailed."""
        if self._embeds:
            return self._embed(text)
        from worker_node.cli.node_client import NodeCallFailed

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
    from worker_node.cli.node_client import NodeCallFailed

    with contextlib.suppress(ImportError):  # where Python was built without it
        import readline  # noqa: F401  (gives `input` arrow keys and a history)
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


def _print_at_once(text: str) -> None:
    print(text, end="", flush=True)
