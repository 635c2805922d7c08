"""`npu-client`: the parser of all commands, the settings of its flags, and errors as one line on stderr."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import errno
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from backend_client.errors import ConfigurationError, NPUError
from backend_client.settings import CONFIG_VARIABLE, ClientSettings

_REMEDIES = {
    errno.ENOSPC: "free some space, or write to a larger disk",
    errno.EDQUOT: "free some space, or write to a larger disk",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a file or directory that this user may use",
    errno.EPERM: "choose a file or directory that this user may use",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENETUNREACH: "check the network and the node's address",
    errno.EADDRINUSE: "choose another --port",
}


def sentence(error: OSError) -> str:
    """What happened, where, and what to do about it."""
    where = f"{error.filename}: " if error.filename else ""
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{reason}" + (f"; {remedy}" if remedy else "")


# Ends a command: errors as one sentence on standard error, and an exit status.


class WrongUsage(ConfigurationError):
    """The values of a command's flags make no sense."""


def reported(work: Callable[[], int], program: str = "npu-client") -> int:
    """The status of `work`, or that of the error it raised: 1 with a message, 2 for WrongUsage, 130 interrupted."""
    try:
        return work()
    except WrongUsage as error:
        return _fail(program, error.message, 2)
    except NPUError as error:
        return _fail(program, error.message)
    except KeyboardInterrupt:
        return _fail(program, "interrupted", 130)
    except BrokenPipeError:
        # As `npu-client embed | head`: the reader of our output has seen enough.
        _drop_output()
        return 141  # as the shell says of one that SIGPIPE ended
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:  # such as a full disk: what is left of the output would be written again at exit
            _drop_output()
        return _fail(program, sentence(error))


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(program: str, message: str, status: int = 1) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status


# The modules of the commands, in the order in which a user meets them.
MODULES = ("calls", "dashboard", "dataset")


class _Parser(argparse.ArgumentParser):
    """Names the nearest command, option or choice in its errors, as argparse does from Python 3.14 on.

    What a command does not know is the whole parser's error, so that one looks at the options of all `commands`.
    """

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"(?:invalid choice: '|unrecognized arguments: )([\w.-]+)(.*)", message):
            offered = re.findall(r"[\w.-]+", wrong[2].partition("choose from")[2])
            helps = "".join(parser.format_help() for parser in (self, *self.commands.values()))
            near = difflib.get_close_matches(wrong[1], offered or re.findall(r"--[\w-]+", helps), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="npu-client",
        description="Call NPU nodes. Settings come from flags, then NPU_CLIENT_* in the environment, then the file.",
    )
    parser.add_argument("--version", action="version", version=f"npu-client {_version()}")
    _add_settings(parser)
    # Without a command the help is shown: a first look is not a mistake.
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in MODULES:
        importlib.import_module(f"backend_client.cli.{name}").add_parser(subparsers)
    parser.commands = subparsers.choices
    for command in subparsers.choices.values():
        _add_settings(command.add_argument_group("settings, here or before the command"), "_behind")
    return parser


def _add_settings(parser: argparse._ActionsContainer, suffix: str = "") -> None:
    """The flags that may stand before the command and behind it: what is behind has names of its own, with `suffix`."""
    add = parser.add_argument
    add("--config", dest=f"config{suffix}", type=Path, help=f"TOML file (else the one {CONFIG_VARIABLE} names)")
    add("--node", dest=f"nodes{suffix}", action="append", metavar="URL", help="a node; may be given again")
    add("--local-only", dest=f"local_only{suffix}", action="store_true", default=None, help="never ask the cloud")


def _settings(args: argparse.Namespace) -> ClientSettings:
    """The settings, with the flags: what stands behind the command is nearer, and all nodes count."""
    flags: dict[str, Any] = {}
    if args.nodes or args.nodes_behind:
        flags["nodes"] = [*(args.nodes or ()), *(args.nodes_behind or ())]
    if args.local_only or args.local_only_behind:
        flags["local_only"] = True
    return ClientSettings.load(args.config_behind or args.config, **flags)


def _version() -> str:
    try:
        return version("npu-node")
    except PackageNotFoundError:
        return "(not installed as a package)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted.

    The commands for data sets have more: see `backend_client.bulk.ExitCode`.
    """
    return reported(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help()
        return 0
    status: int = asyncio.run(args.run(args, _settings(args)))
    if sys.stdout is not None:
        # Closed by the caller (>&-). The installed commands never get here: `npu_commands` opens it on /dev/null.
        sys.stdout.flush()
    return status
