"""`npu-node ps`: the models that the running node has loaded, on which device, and until when."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_HEAD = ("NAME", "SIZE", "DEVICE", "CONTEXT", "UNTIL")
# How Ollama's dialect says that a model stays.
_FOREVER = "2318"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("ps", help="list the loaded models of the running node", description=__doc__)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the models; none when no node runs."""
    from worker_node.commands.node_client import DEFAULT_URL, node_or_none
    from worker_node.commands.tables import megabytes, table

    with node_or_none() as node:
        models: list[dict[str, Any]] = [] if node is None else node.get("/api/ps")["models"]
    if node is None:
        print(f"npu-node: no node runs at {DEFAULT_URL}, so nothing is loaded", file=sys.stderr)
    rows = [
        {
            "name": model["name"].removesuffix(":latest"),
            "size": model["size"],
            "device": model["device"],
            "context": model["context_length"],
            "until": None if model["expires_at"].startswith(_FOREVER) else model["expires_at"],
        }
        for model in models
    ]
    if args.json:
        import orjson

        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
    else:
        cells = [
            (r["name"], megabytes(r["size"]), r["device"], str(r["context"]), r["until"] or "it is unloaded by hand")
            for r in rows
        ]
        print(table(_HEAD, cells))
    return 0
