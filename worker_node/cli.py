"""`npu-node`: one program, one file of `worker_node.commands` a subcommand."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from worker_node import __version__
from worker_node.commands.os_errors import sentence
from worker_node.core.errors import NodeError

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
    "compile",
    "job",
    "smoke",
    "doctor",
    "bench",
)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="npu-node", description="An inference node beside an Intel NPU.")
    parser.add_argument("--version", action="version", version=f"npu-node {__version__}")
    # Without a command the help is shown: a first look is no mistake.
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"worker_node.commands.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--version"]:
        # Answered before the commands are imported: it works where the extra `node` is missing.
        print(f"npu-node {__version__}")
        return 0
    status = 1
    try:
        status = _run(argv)
        if sys.stdout is not None:
            # Closed by the caller (>&-). The installed commands never get here: `npu_commands` opens it on /dev/null.
            sys.stdout.flush()
    except NodeError as error:
        _say(error.message)
    except KeyboardInterrupt:
        _say("interrupted")
        status = 130
    except BrokenPipeError:
        status = _reader_gone()
    except OSError as error:
        _say(_about_output(error) or sentence(error))
        status = 1
    except ModuleNotFoundError as error:
        _say(_missing(error))
    return status


def _run(argv: Sequence[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help()
        return 0
    status: int = args.run(args)
    return status


def _say(message: str) -> None:
    print(f"npu-node: {message}", file=sys.stderr)


def _reader_gone() -> int:
    """As `npu-node list | head`: what read our output has seen enough. Nothing is to be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _about_output(error: OSError) -> str | None:
    """For an error of standard output itself: what could not be written is still there, and fails again."""
    try:
        sys.stdout.flush()
    except OSError as again:
        if again.errno == error.errno:
            # Nothing is to be written at exit either.
            _reader_gone()
            return f"the output cannot be written: {(error.strerror or str(error)).lower()}"
    return None


def _missing(error: ModuleNotFoundError) -> str:
    """For an installation without the extra `node`. Any other missing module is a fault of ours: raised again."""
    name = (error.name or "").partition(".")[0]
    if name in {"", "worker_node", "backend_client"}:
        raise error
    return (
        f"{name} is not installed: this environment has only the client; "
        "add the node with: pip install 'npu-node[node,convert]'"
    )
