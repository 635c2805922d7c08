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
    parser.add_argument("--config", type=Path, help=f"TOML file with settings (else the one {CONFIG_VARIABLE} names)")
    parser.add_argument("--node", action="append", dest="nodes", metavar="URL", help="a node; may be given again")
    parser.add_argument("--local-only", action="store_true", default=None, help="never ask the cloud")
    # Without a command the help is shown: a first look is no mistake.
    parser.set_defaults(run=None, start=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"backend_client._cli.commands.{name}").add_parser(subparsers)
    return parser


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
    flags: dict[str, Any] = {
        name: value for name in ("nodes", "local_only") if (value := getattr(args, name)) is not None
    }
    settings = ClientSettings.load(args.config, **flags)
    # A command that has a process of its own for its work starts its event loop there.
    if args.start is not None:
        status: int = args.start(args, settings)
    else:
        status = asyncio.run(args.run(args, settings))
    sys.stdout.flush()
    return status
