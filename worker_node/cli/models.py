"""What models there are: `list`, `show` and `models`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from worker_node.models.catalog import CatalogEntry
    from worker_node.models.directory import InstalledModel


def add_list(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`npu-node list`."""
    parser = commands.add_parser(
        "list",
        help="list the installed models",
        description="List the installed models, of the running node or in the store; with --all the whole catalog.",
    )
    parser.add_argument("--all", action="store_true", help="everything that can be pulled by name as well")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_list)


def add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`npu-node show MODEL`."""
    parser = commands.add_parser(
        "show", help="show what is known of a model", description="Show what is known of one model."
    )
    parser.add_argument("model", metavar="MODEL", help="id, alias or source")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_show)


def add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`npu-node models`."""
    parser = commands.add_parser("models", help="list the models of the catalog and of the store")
    parser.add_argument("--json", action="store_true", help="as JSON, one array")
    parser.set_defaults(run=_models)


def _list(args: argparse.Namespace) -> int:
    if args.all:
        return _models(args)
    from worker_node.cli.node_client import on_node
    from worker_node.cli.output import megabytes, print_json, table

    rows = on_node(args, lambda node: list(map(_row, node.models())), lambda: list(map(_row, _of_store(args))))
    if args.json:
        print_json(rows)
        return 0
    cells = [(r["name"], megabytes(r["size"]), r["quantization"] or "", r["family"] or "", r["state"]) for r in rows]
    print(table(("NAME", "SIZE", "WEIGHTS", "FAMILY", "STATE"), cells))
    return 0


def _row(model: Mapping[str, Any]) -> dict[str, Any]:
    from worker_node.cli.output import serving_device

    details = model.get("details") or {}
    device = serving_device(model)
    return {
        "name": model["id"],
        "size": model.get("size"),
        "quantization": details.get("quantization"),
        "family": details.get("family"),
        "state": model["state"] if device is None else f"loaded on {device}",
    }


def _of_store(args: argparse.Namespace, name: str | None = None) -> list[dict[str, Any]]:
    """The installed models, or the one of that name, as a node without engines describes them."""
    from worker_node.cli.serve import node_store

    store = node_store(args)
    found = store.installed() if name is None else [store.get(name)]
    here = {"state": "installed", "reason": None}
    return [
        model.describe()
        | here
        | {"aliases": list(model.aliases), "capabilities": [model.kind], "directory": str(model.path)}
        for model in found
    ]


def _show(args: argparse.Namespace) -> int:
    from worker_node.cli.node_client import NodeCallFailed, on_node
    from worker_node.cli.output import megabytes, print_json, printable
    from worker_node.core.errors import ModelNotFound
    from worker_node.models.catalog import Catalog

    try:
        facts = on_node(
            args, lambda node: _facts(node.model(args.model)), lambda: _facts(_of_store(args, args.model)[0])
        )
    except (ModelNotFound, NodeCallFailed) as error:
        entry = Catalog.load().find(args.model)
        if entry is None or getattr(error, "http_status", 404) != 404:
            raise
        facts = _facts(_not_installed(entry))
    if args.json:
        print_json(facts)
        return 0
    sizes = {name: facts[name] and megabytes(facts[name]) for name in ("size", "download")}
    for name, value in (facts | sizes).items():
        if value not in (None, []):
            print(printable(f"{name.replace('_', ' '):<14}{', '.join(value) if isinstance(value, list) else value}"))
    return 0


def _not_installed(entry: CatalogEntry) -> dict[str, Any]:
    """A model of the catalog as `describe` does; the hub has to be asked for a size that the catalog lacks."""
    download = getattr(entry.source, "size", None)
    asked = "" if download else f" (its size: npu-node pull --check {entry.id})"
    return {
        "id": entry.id,
        "state": "not installed",
        "reason": None,
        "capabilities": [entry.kind],
        "details": {"quantization": entry.quantization, "family": entry.family, "licence": entry.licence},
        "context": entry.context_limit,
        "source": str(entry.source),
        "aliases": list(entry.aliases),
        "download": download,
        "install": f"npu-node pull {entry.id}{asked}",
    }


def _facts(known: Mapping[str, Any]) -> dict[str, Any]:
    from worker_node.cli.output import serving_device
    from worker_node.models.catalog import devices_for

    details = known.get("details") or {}
    placed = [str(placement["device"]) for placement in known.get("devices") or ()]
    return {
        "name": known["id"],
        "state": known["state"],
        "install": known.get("install"),
        "download": known.get("download"),
        "device": serving_device(known),
        "runs_on": placed or devices_for(known.get("capabilities"), details.get("quantization")),
        "reason": known["reason"],
        "capabilities": known.get("capabilities"),
        "context": known.get("context"),
        "dimensions": details.get("dimensions"),
        "weights": details.get("quantization"),
        "family": details.get("family"),
        "licence": details.get("licence"),
        "source": known.get("source"),
        "aliases": known["aliases"],
        "size": known.get("size"),
        "directory": known.get("directory"),
        "prompts": sorted(details.get("prompts") or []),
        "matryoshka": [str(size) for size in details.get("matryoshka") or []],
    }


def _models(args: argparse.Namespace) -> int:
    """The catalog's models first, then what else is in the store; a damaged model does not hide the others."""
    from worker_node.cli.output import megabytes, print_json, table
    from worker_node.cli.serve import node_store
    from worker_node.devices.npu import ACCEL_DEVICES

    store = node_store(args)
    directories = {path.name: path for path in store.directories()}
    rows = [_catalog_row(entry.id, directories.pop(entry.id, None), entry) for entry in store.catalog]
    rows += [_catalog_row(name, path, None) for name, path in directories.items()]
    if args.json:
        print_json(rows)
        return 0
    head = ("NAME", "KIND", "DOWNLOAD", "DISK", "WEIGHTS", "NPU", "LICENCE")
    cells = [
        (
            row["name"],
            row["kind"],
            "unknown" if row["download"] is None else megabytes(row["download"]),
            megabytes(row["size"]),
            row["quantization"] or "",
            "yes" if "NPU" in row["devices"] else "no",
            row["licence"],
        )
        for row in rows
    ]
    damaged = [f"{row['name']}: {row['state']}" for row in rows if row["state"].startswith("damaged")]
    print("\n".join([table(head, cells), *damaged]))
    has = "has an NPU" if any(ACCEL_DEVICES.glob("accel*")) else "has no NPU"
    print(f"\nNPU: whether an NPU takes the weights; all models run on a CPU. This machine {has}.")
    print("An unknown download: npu-node pull --check NAME asks the hub.")
    print(f"store: {store.root}")
    return 0


def _catalog_row(name: str, directory: Path | None, entry: CatalogEntry | None) -> dict[str, Any]:
    from worker_node.core.errors import ConfigurationError
    from worker_node.models.catalog import devices_for
    from worker_node.models.directory import read_directory

    state, model = "available", None
    if directory is not None:
        try:
            state, model = "installed", read_directory(directory)
        except ConfigurationError as error:
            state = f"damaged: {error.message}"
    known: CatalogEntry | InstalledModel | None = model or entry
    return {
        "name": name,
        "kind": str(known.kind) if known else "unknown",
        "state": state,
        "size": model.size if model else None,
        "context": known.context_limit if known else None,
        "quantization": str(known.quantization) if known else None,
        "devices": devices_for([known.kind], known.quantization) if known else [],
        "aliases": entry.aliases if entry else (),
        "licence": known.licence if known else "unknown",
        "source": str(known.source) if known else "unknown",
        "download": getattr(entry.source, "size", None) if entry else None,
        "run_here": entry.run_here if entry else "nothing",
    }
