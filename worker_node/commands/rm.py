"""`npu-node rm MODEL…`: remove models, from the running node or the store."""

from __future__ import annotations

import argparse
from http import HTTPStatus
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("rm", help="remove models", description=__doc__)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="id, alias or source")
    parser.add_argument("--force", action="store_true", help="end the requests that a model has in flight")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Remove each model in turn; the first that fails ends it."""
    from worker_node.commands.node_client import on_node

    return on_node(lambda node: _remove_from_node(node, args), lambda: _remove_from_store(args.models))


def _remove_from_node(node: Any, args: argparse.Namespace) -> int:
    from worker_node.commands.node_client import NodeCallFailed, model_path

    for name in args.models:
        try:
            node.delete(model_path(name) + ("?force=true" if args.force else ""))
        except NodeCallFailed as error:
            if error.http_status != HTTPStatus.CONFLICT:
                raise
            raise NodeCallFailed(
                f"{name} has requests in flight; wait for their end, or add --force", error.http_status
            ) from None
        print(f"{name}: removed")
    return 0


def _remove_from_store(models: list[str]) -> int:
    from worker_node.models.store import ModelStore

    store = ModelStore()
    for name in models:
        store.remove(name)
        print(f"{name}: removed from {store.root}")
    return 0
