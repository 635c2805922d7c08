"""`npu-node show MODEL`: what is known of one model."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("show", help="show what is known of a model", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="id, alias or source")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts, one a line."""
    from worker_node.commands.node_client import on_node

    return on_node(lambda node: _print(_of_node(node, args.model), args), lambda: _print(_of_store(args.model), args))


def _of_node(node: Any, name: str) -> dict[str, Any]:
    from worker_node.commands.node_client import model_path

    known = node.get(model_path(name))
    passport = known.get("passport") or {}
    return {
        "name": known["id"],
        "state": known["state"],
        "reason": known["reason"],
        "capabilities": known.get("capabilities"),
        "context": known.get("context"),
        "dimensions": passport.get("dimensions"),
        "weights": passport.get("quantization"),
        "family": passport.get("family"),
        "licence": passport.get("licence"),
        "source": known.get("source"),
        "aliases": known["aliases"],
        "size": known.get("size"),
    }


def _of_store(name: str) -> dict[str, Any]:
    from datetime import UTC, datetime

    from worker_node.models.store import ModelStore

    model = ModelStore().get(name)
    fidelity = model.fidelity
    return {
        "name": model.id,
        "capabilities": [str(model.kind)],
        "context": model.context_limit,
        "dimensions": model.dimensions,
        "weights": model.quantization,
        "family": model.family,
        "licence": model.licence,
        "source": model.source,
        "installed": datetime.fromtimestamp(model.installed_at, UTC).isoformat(),
        "aliases": list(model.aliases),
        "size": model.size,
        "directory": str(model.path),
        "fidelity": None if fidelity is None else f"KL {fidelity.kl:g} per token, same likeliest {fidelity.top1:.0%}",
    }


def _print(facts: dict[str, Any], args: argparse.Namespace) -> int:
    if args.json:
        import orjson

        print(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode())
        return 0
    for name, value in facts.items():
        if value not in (None, []):
            print(f"{name:<14}{', '.join(value) if isinstance(value, list) else value}")
    return 0
