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
        "prompts": sorted(passport.get("prompts") or []),
        "matryoshka": [str(size) for size in passport.get("matryoshka") or []],
        "fidelity": _vector_fidelity(passport.get("vector_fidelity")),
    }


def _of_store(name: str) -> dict[str, Any]:
    from datetime import UTC, datetime

    import msgspec

    from worker_node.models.store import ModelStore

    model = ModelStore().get(name)
    fidelity, vectors = model.fidelity, model.vector_fidelity
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
        "prompts": sorted(model.prompts),
        "matryoshka": [str(size) for size in model.matryoshka],
        "fidelity": _vector_fidelity(None if vectors is None else msgspec.to_builtins(vectors))
        if fidelity is None
        else f"KL {fidelity.kl:g} per token, same likeliest {fidelity.top1:.0%}",
    }


def _vector_fidelity(facts: dict[str, Any] | None) -> str | None:
    """How near an encoder's vectors are to those of the published weights, in words."""
    if facts is None:
        return None
    return (
        f"cosine to the f32 vectors {facts['mean_cosine']:.4f} on average, at least {facts['min_cosine']:.4f} "
        f"({facts['texts']} texts)"
    )


def _print(facts: dict[str, Any], args: argparse.Namespace) -> int:
    if args.json:
        import orjson

        print(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode())
        return 0
    for name, value in facts.items():
        if value not in (None, []):
            print(f"{name:<14}{', '.join(value) if isinstance(value, list) else value}")
    return 0
