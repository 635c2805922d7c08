"""`npu-node ps`: the models that the running node has loaded, on which device, and until when."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_HEAD = ("NAME", "MEMORY", "DEVICE", "CONTEXT", "UNLOADED")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("ps", help="list the loaded models of the running node", description=__doc__)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the models; none when no node runs."""
    from worker_node.commands.node_client import node_or_none, where_no_node_runs
    from worker_node.commands.tables import megabytes, serving_device, table

    with node_or_none() as node:
        models: list[dict[str, Any]] = [] if node is None else node.get("/models")["models"]
    if node is None:
        print(f"npu-node: {where_no_node_runs()}, so nothing is loaded", file=sys.stderr)
    rows = [
        {
            "name": model["id"],
            "memory": model["memory"]["bytes"],
            "device": device,
            "context": model["context"],
            "expires_in_s": model["expires_in_s"],
        }
        for model in models
        if (device := serving_device(model)) is not None
    ]
    if args.json:
        import orjson

        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
    else:
        cells = [
            (r["name"], megabytes(r["memory"]), r["device"], str(r["context"]), _when(r["expires_in_s"])) for r in rows
        ]
        print(table(_HEAD, cells))
    return 0


def _when(seconds: float | None) -> str:
    return "by hand" if seconds is None else f"in {seconds:.0f} s if idle"
