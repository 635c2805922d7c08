"""`npu-client`: one program, one file of `backend_client._cli.commands` a subcommand."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from backend_client._cli.os_errors import sentence
from backend_client.errors import NPUError
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
    parser.set_defaults(run=None)
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
    try:
        parser = build_parser()
        args = parser.parse_args(argv)
        if args.run is None:
            parser.print_help()
            return 0
        flags: dict[str, Any] = {
            name: value for name in ("nodes", "local_only") if (value := getattr(args, name)) is not None
        }
        status: int = asyncio.run(args.run(args, ClientSettings.load(args.config, **flags)))
        sys.stdout.flush()
    except NPUError as error:
        return _fail(error.message)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # As `npu-client embed | head`: who reads our output has seen enough. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        return _fail(sentence(error))
    return status


def _fail(message: str, status: int = 1) -> int:
    print(f"npu-client: {message}", file=sys.stderr)
    return status
