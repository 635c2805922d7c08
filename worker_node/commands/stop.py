"""`npu-node stop MODEL…`: unload models of the running node; they stay installed."""

from __future__ import annotations

import argparse

from worker_node.core.errors import ConfigurationError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("stop", help="unload models of the running node", description=__doc__)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="id, alias or source")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Unload each model: now, or when it has done what it is at."""
    from worker_node.commands.node_client import model_path, node_or_none, where_no_node_runs

    with node_or_none() as node:
        if node is None:
            raise ConfigurationError(f"{where_no_node_runs()}, so nothing is loaded")
        for name in args.models:
            node.post(model_path(name, "unload"))
            print(f"{name}: unloaded")
    return 0
