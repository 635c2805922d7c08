"""`npu-node list`: the installed models, of the running node or in the store; with --all the whole catalog."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from worker_node.commands.tables import megabytes, serving_device, table

_HEAD = ("NAME", "SIZE", "WEIGHTS", "FAMILY", "STATE")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("list", help="list the installed models", description=__doc__)
    parser.add_argument("--all", action="store_true", help="everything that can be pulled by name as well")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the models."""
    if args.all:
        from worker_node.commands.models import run as list_catalog

        return list_catalog(args)
    from worker_node.commands.node_client import on_node

    return on_node(lambda node: _show(_of_node(node), args), lambda: _show(_of_store(), args))


def _of_node(node: Any) -> list[dict[str, Any]]:
    return [_row(model) for model in node.get("/models")["models"]]


def _row(model: Mapping[str, Any]) -> dict[str, Any]:
    passport = model.get("passport") or {}
    device = serving_device(model)
    return {
        "name": model["id"],
        "size": model.get("size"),
        "quantization": passport.get("quantization"),
        "family": passport.get("family"),
        "state": model["state"] if device is None else f"loaded on {device}",
    }


def _of_store() -> list[dict[str, Any]]:
    from worker_node.models.store import ModelStore

    return [
        {
            "name": model.id,
            "size": model.size,
            "quantization": model.quantization,
            "family": model.family,
            "state": "installed",
        }
        for model in ModelStore().installed()
    ]


def _show(rows: list[dict[str, Any]], args: argparse.Namespace) -> int:
    if args.json:
        import orjson

        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return 0
    cells = [(r["name"], megabytes(r["size"]), r["quantization"] or "", r["family"] or "", r["state"]) for r in rows]
    print(table(_HEAD, cells))
    return 0
