"""`npu-node`: the parser of all commands, exit statuses, and errors as one line on stderr."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from worker_node import __version__
from worker_node.cli.output import documentation, say
from worker_node.core.errors import INSTALL_EXTRA, NodeError

# The commands that call a running node.
_CALLING = ("run", "pull", "list", "ps", "show", "stop", "rm")
# Lists of words: argparse takes no further ones after an option, as in npu-node run smollm2 --verbose "Hello".
_WORDS = ("prompt", "models", "names")


class _Parser(argparse.ArgumentParser):
    """Names the nearest command, option or choice in its errors, as argparse does from Python 3.14 on."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"(?:invalid choice: '|unrecognized arguments: )([\w.-]+)(.*)", message):
            offered = re.findall(r"[\w.-]+", wrong[2].partition("choose from")[2])
            choices = offered or re.findall(r"--[\w-]+", self.format_help())
            near = difflib.get_close_matches(wrong[1], choices, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; commands in the order in which a user meets them."""
    from worker_node.cli import bounded, certify, compile, doctor, models, pull, run, serve  # noqa: A004

    parser: argparse.ArgumentParser = _Parser(prog="npu-node", description="An inference node beside an Intel NPU.")
    if (pages := documentation()) is not None:
        parser.epilog = f"docs/ in messages: {pages}"
    parser.add_argument("--version", action="version", version=f"npu-node {__version__}")
    # Without a command the help is shown, with status 0.
    parser.set_defaults(run=None, parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (
        serve.add_serve,
        run.add_run,
        pull.add_pull,
        models.add_commands,
        compile.add_compile,
        bounded.add_smoke,
        doctor.add_doctor,
        bounded.add_bench,
        certify.add_certify,
        certify.add_passports,
    ):
        add(subparsers)
    for command in subparsers.choices.values():
        command.set_defaults(parser=command)
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
        say(error.message)
    except KeyboardInterrupt:
        say("interrupted")
        status = 130
    except BrokenPipeError:
        # The reader closed the pipe, as in `npu-node list | head`; as the shell says of one that SIGPIPE ended.
        _discard_output()
        status = 141
    except OSError as error:
        say(_output_problem(error) or describe(error))
        status = 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in {"", "worker_node", "backend_client"}:
            raise  # a missing module of our own is a bug
        say(
            f"{name} is not installed: this environment has only the client; "
            f"add the node with {INSTALL_EXTRA.format('node,convert')}"
        )
    return status


def _run(argv: Sequence[str]) -> int:
    place = next((place for place, word in enumerate(argv) if word in _CALLING), 0)
    if argv and argv[0].partition("=")[0] in {"--host", "--port"} and "serve" not in argv:
        # As npu-proxy and other servers are started.
        argv = ["serve", *argv]
    elif place and argv[0].startswith("-"):
        # Options before the command are moved behind it: `npu-node --verbose run smollm2`.
        argv = [argv[place], *argv[:place], *argv[place + 1 :]]
    args, rest = build_parser().parse_known_args(argv)
    words = next((found for name in _WORDS if isinstance(found := getattr(args, name, None), list)), None)
    if rest and (words is None or any(word.startswith("-") and " " not in word for word in rest)):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if words is not None:
        words += rest
    if args.run is None:
        args.parser.print_help()
        return 0
    status: int = args.run(args)
    return status


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output_problem(error: OSError) -> str | None:
    """The message for an error of standard output itself: flushing what is still buffered fails in the same way."""
    try:
        sys.stdout.flush()
    except OSError as repeated:
        if repeated.errno == error.errno:
            _discard_output()
            return f"the output cannot be written: {(error.strerror or str(error)).lower()}"
    return None


def describe(error: OSError) -> str:
    """An error of the operating system in one sentence: where, what happened, and for the store what to do."""
    from worker_node.models.disk import storage_problem

    if (problem := storage_problem(error)) is not None:
        return problem
    where = f"{error.filename}: " if error.filename else ""
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    return f"{where}{reason}"
