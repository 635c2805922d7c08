"""`npu-client`: one program, one file of `backend_client._cli.commands` a subcommand."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend_client._cli.commands import bench, dashboard, embed, generate, health
from backend_client.errors import NPUError
from backend_client.settings import CONFIG_VARIABLE, ClientSettings

# In the order in which a user meets them.
COMMANDS = (health, dashboard, embed, generate, bench)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="npu-client",
        description="Call NPU nodes. Settings come from flags, then NPU_CLIENT_* in the environment, then the file.",
    )
    parser.add_argument("--config", type=Path, help=f"TOML file with settings (else the one {CONFIG_VARIABLE} names)")
    parser.add_argument("--node", action="append", dest="nodes", metavar="URL", help="a node; may be given again")
    parser.add_argument("--local-only", action="store_true", default=None, help="never ask the cloud")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted."""
    args = build_parser().parse_args(argv)
    flags: dict[str, Any] = {
        name: value for name in ("nodes", "local_only") if (value := getattr(args, name)) is not None
    }
    try:
        status: int = asyncio.run(args.run(args, ClientSettings.load(args.config, **flags)))
    except NPUError as error:
        print(f"npu-client: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("npu-client: interrupted", file=sys.stderr)
        return 130
    return status
