"""What the running node has loaded: `ps` and `stop`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from worker_node.core.errors import ConfigurationError


def add_ps(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`npu-node ps`."""
    parser = commands.add_parser(
        "ps",
        help="list the loaded models of the running node",
        description="List the models that the running node has loaded, on which device, and until when.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_ps)


def add_stop(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`npu-node stop MODEL…`."""
    parser = commands.add_parser(
        "stop",
        help="unload models of the running node",
        description="Unload models of the running node, after their requests in flight; they stay installed.",
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="id, alias or source")
    parser.set_defaults(run=_stop)


def _ps(args: argparse.Namespace) -> int:
    from worker_node.cli.node_client import node_or_none, where_no_node_runs
    from worker_node.cli.output import megabytes, print_json, serving_placement, table

    with node_or_none(args) as node:
        models = [] if node is None else node.models()
        rows = [
            {
                "name": model["id"],
                "memory": model["memory"]["bytes"],
                "device": placement["device"],
                "context": model["context"],
                "expires_in_s": model["expires_in_s"],
                "emulated": placement["emulated"],
                "certified": placement["certified"],
                "certified_reason": placement["certified_reason"],
                "certified_limit": placement["certified_limit"],
            }
            for model in models
            if (placement := serving_placement(model)) is not None
        ]
    if node is None:
        print(f"npu-node: {where_no_node_runs()}, so nothing is loaded", file=sys.stderr)
    if args.json:
        print_json(rows)
        return 0
    cells = [
        (r["name"], megabytes(r["memory"]), _device(r), str(r["context"]), _certified(r), _when(r["expires_in_s"]))
        for r in rows
    ]
    print(table(("NAME", "MEMORY", "DEVICE", "CONTEXT", "CERTIFIED", "UNLOADED"), cells))
    return 0


def _device(row: Mapping[str, Any]) -> str:
    return f"{row['device']} (emulated)" if row["emulated"] else str(row["device"])


def _certified(row: Mapping[str, Any]) -> str:
    state = str(row["certified"] or "-")
    return f"{state} to {row['certified_limit']} tokens" if state == "limited" else state


def _when(seconds: float | None) -> str:
    return "by hand" if seconds is None else f"in {seconds:.0f} s if idle"


def _stop(args: argparse.Namespace) -> int:
    from worker_node.cli.node_client import model_path, node_or_none, where_no_node_runs

    with node_or_none(args) as node:
        if node is None:
            raise ConfigurationError(f"{where_no_node_runs()}, so nothing is loaded")
        for name in args.models:
            node.call("POST", model_path(name, "unload"))
            print(f"{name}: unloaded")
    return 0
