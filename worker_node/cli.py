"""`npu-node`: one program, one file of `worker_node.commands` a subcommand."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from worker_node import __version__
from worker_node.errors import NodeError

# In the order in which a user meets them. Each module keeps its heavy imports inside `run`.
COMMANDS = (
    "serve",
    "run",
    "pull",
    "list",
    "ps",
    "show",
    "stop",
    "rm",
    "models",
    "convert",
    "job",
    "smoke",
    "doctor",
    "bench",
)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="npu-node", description="An inference node beside an Intel NPU.")
    parser.add_argument("--version", action="version", version=f"npu-node {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"worker_node.commands.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 1 failed with a message, 2 wrong usage."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except NodeError as error:
        print(f"npu-node: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("npu-node: interrupted", file=sys.stderr)
        return 130
    return status
