"""`npu-client`: one program, one file of `backend_client._cli.commands` a subcommand."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from backend_client._cli.reporting import reported
from backend_client.settings import ClientSettings
from backend_client.settings.variables import CONFIG_VARIABLE

# In the order in which a user meets them.
COMMANDS = ("health", "dashboard", "embed", "generate", "dataset", "bench")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="npu-client",
        description="Call NPU nodes. Settings come from flags, then NPU_CLIENT_* in the environment, then the file.",
    )
    parser.add_argument("--version", action="version", version=f"npu-client {_version()}")
    _add_settings(parser)
    # Without a command the help is shown: a first look is no mistake.
    parser.set_defaults(run=None, start=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"backend_client._cli.commands.{name}").add_parser(subparsers)
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
    settings = _settings(args)
    # A command that has a process of its own for its work starts its event loop there.
    if args.start is not None:
        status: int = args.start(args, settings)
    else:
        status = asyncio.run(args.run(args, settings))
    if sys.stdout is not None:
        # Closed by the caller (>&-). The installed commands never get here: `npu_commands` opens it on /dev/null.
        sys.stdout.flush()
    return status
