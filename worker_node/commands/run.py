"""`npu-node run MODEL ["prompt"]`: chat with a model in the terminal.

It talks to the running node (NPU_NODE_URL), or starts one for as long as the chat lasts; a model that is not installed
is pulled first. Ctrl-C stops an answer; /bye or Ctrl-D ends the chat; lines between two \"\"\" are one message.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from worker_node.commands import job

if TYPE_CHECKING:
    from worker_node.commands.node_client import NodeClient


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand, and the options of the bounded job that it once was."""
    parser = subparsers.add_parser("run", help="chat with a model in the terminal", description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="what npu-node pull takes")
    parser.add_argument("prompt", nargs="*", help="one message: answer it and end; standard input is added to it")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--verbose", action="store_true", help="after each answer: device, tokens and speed, on stderr")
    job.add_options(parser, required=False)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Chat, or answer one prompt; 0 when the answers came."""
    if args.job is not None or args.input is not None:
        if args.job is None or args.input is None or args.model is not None:
            args.parser.error("a bounded job has --job and --input and no model; see: npu-node job --help")
        return job.run(args)
    if args.model is None:
        args.parser.error("name a model, see: npu-node list --all")

    from worker_node.commands.chat import Chat, converse

    with _node() as node:
        chat = Chat(node, args.model, system=args.system, verbose=args.verbose)
        chat.prepare()
        prompt = _whole_prompt(args.prompt)
        if prompt is None:
            return converse(chat)
        return 0 if chat.answer(prompt) else 130


@contextlib.contextmanager
def _node() -> Iterator[NodeClient]:
    from worker_node.commands.node_client import node_or_none
    from worker_node.commands.own_node import own_node

    with node_or_none() as running:
        if running is not None:
            yield running
            return
        print("npu-node: no node is running; starting one for this chat", file=sys.stderr)
        with own_node() as node:
            yield node


def _whole_prompt(words: list[str]) -> str | None:
    """The arguments, and after these what is piped in; None when there is neither."""
    parts = [" ".join(words)] if words else []
    if not sys.stdin.isatty() and (piped := sys.stdin.read()).strip():
        parts.append(piped)
    if not parts and not sys.stdin.isatty():
        return ""
    return "\n".join(parts) if parts else None
