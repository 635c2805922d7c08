"""Models that are installed or loaded: `list`, `show`, `ps`, `stop` and `rm`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_node.cli.output import megabytes, print_json, printable, serving_placement, table
from worker_node.cli.serve import node_options, node_store
from worker_node.core.errors import ConfigurationError, ModelNotFound
from worker_node.models.catalog import Catalog, CatalogEntry
from worker_node.models.npu_rules import devices_for

if TYPE_CHECKING:
    from worker_node.cli.node_client import NodeClient
    from worker_node.models.directory import InstalledModel


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    declared = (
        (
            "list",
            _list,
            "list the installed models",
            "List the installed models, of the running node or in the store; with --all the whole catalog.",
        ),
        (
            "ps",
            _ps,
            "list the loaded models of the running node",
            "List the models that the running node has loaded, on which device, and until when.",
        ),
        ("show", _show, "show what is known of a model", "Show what is known of one model."),
        (
            "stop",
            _stop,
            "unload models of the running node",
            "Unload models of the running node, after their requests in flight; they stay installed.",
        ),
        ("rm", _rm, "remove models", "Remove models, from the running node or the store."),
    )
    parsers = {}
    for name, run, summary, description in declared:
        parsers[name] = commands.add_parser(name, help=summary, description=description, parents=[node_options()])
        parsers[name].set_defaults(run=run)
    parsers["show"].add_argument("model", metavar="MODEL", help="id, alias or source")
    for name in ("stop", "rm"):
        parsers[name].add_argument("models", metavar="MODEL", nargs="+", help="id, alias or source")
    parsers["list"].add_argument("--all", action="store_true", help="everything that can be pulled by name as well")
    for name in ("list", "ps", "show"):
        parsers[name].add_argument("--json", action="store_true", help="as JSON")
    removal = parsers["rm"]
    removal.add_argument("--force", action="store_true", help="end the requests that a model has in flight")
    removal.add_argument("--model-store", type=Path, help="directory of the models")


def _list(args: argparse.Namespace) -> int:
    from worker_node.cli.node_client import on_node

    if args.all:
        return _list_catalog(args)
    rows = []
    for model in on_node(args, lambda node: node.models(), lambda: _of_store(args)):
        details, placement = model.get("details") or {}, serving_placement(model)
        row = {
            "name": model["id"],
            "size": model.get("size"),
            "quantization": details.get("quantization"),
            "family": details.get("family"),
            "state": model["state"] if placement is None else f"loaded on {placement['device']}",
        }
        rows.append(row)
    if args.json:
        print_json(rows)
        return 0
    cells = [(r["name"], megabytes(r["size"]), r["quantization"] or "", r["family"] or "", r["state"]) for r in rows]
    print(table(("NAME", "SIZE", "WEIGHTS", "FAMILY", "STATE"), cells))
    return 0


def _of_store(args: argparse.Namespace, name: str | None = None) -> list[dict[str, Any]]:
    """The installed models, or the one of that name, as a node without engines describes them."""
    store = node_store(args)
    found = store.installed() if name is None else [store.get(name)]
    return [
        model.describe()
        | {
            "state": "installed",
            "reason": None,
            "aliases": list(model.aliases),
            "capabilities": [model.kind],
            "directory": str(model.path),
        }
        for model in found
    ]


def _list_catalog(args: argparse.Namespace) -> int:
    """The catalog's models first, then what else is in the store; a damaged model does not hide the others."""
    from worker_node.devices.npu import ACCEL_DEVICES

    store = node_store(args)
    directories = {path.name: path for path in store.directories()}
    rows = [_catalog_row(entry.id, directories.pop(entry.id, None), entry) for entry in store.catalog.entries]
    rows += [_catalog_row(name, path, None) for name, path in directories.items()]
    if args.json:
        print_json(rows)
        return 0
    head = ("NAME", "KIND", "DOWNLOAD", "DISK", "WEIGHTS", "NPU", "LICENCE")
    cells = [
        (
            row["name"],
            row["kind"],
            f"~{megabytes(row['estimated_download'])}" if row["estimated_download"] else megabytes(row["download"]),
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
    print("~: estimated; npu-node pull --check NAME asks the hub.")
    print(f"store: {store.root}")
    return 0


def _catalog_row(name: str, directory: Path | None, entry: CatalogEntry | None) -> dict[str, Any]:
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
        "estimated_download": entry.estimated_download if entry else None,
        "run_here": entry.run_here if entry else "nothing",
    }


def _show(args: argparse.Namespace) -> int:
    from worker_node.cli.node_client import NodeCallFailed, on_node

    try:
        known = on_node(args, lambda node: node.model(args.model), lambda: _of_store(args, args.model)[0])
        facts = _facts(known)
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
    """A model of the catalog as `describe` does; only the hub knows the exact size of its own."""
    size = entry.estimated_download
    asked = f" (about {megabytes(size)}; exactly: npu-node pull --check {entry.id})" if size else ""
    return {
        "id": entry.id,
        "state": "not installed",
        "reason": None,
        "capabilities": [entry.kind],
        "details": {"quantization": entry.quantization, "family": entry.family, "licence": entry.licence},
        "context": entry.context_limit,
        "source": str(entry.source),
        "aliases": list(entry.aliases),
        "download": getattr(entry.source, "size", None),
        "install": f"npu-node pull {entry.id}{asked}",
    }


def _facts(known: Mapping[str, Any]) -> dict[str, Any]:
    details = known.get("details") or {}
    placed = [str(placement["device"]) for placement in known.get("devices") or ()]
    serving = serving_placement(known)
    return {
        "name": known["id"],
        "state": known["state"],
        "install": known.get("install"),
        "download": known.get("download"),
        "device": serving and str(serving["device"]),
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


def _ps(args: argparse.Namespace) -> int:
    from worker_node.cli.node_client import node_or_none, where_no_node_runs

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
                "faults": placement["faults"],
            }
            for model in models
            if (placement := serving_placement(model)) is not None
        ]
        placements = [placement for model in models for placement in model["devices"]]
        # Each once, also those of engines that are not loaded.
        faults = dict.fromkeys(fault for placement in placements for fault in placement["faults"])
    if node is None:
        print(f"npu-node: {where_no_node_runs()}, so nothing is loaded", file=sys.stderr)
    if args.json:
        print_json(rows)
        return 0
    cells = []
    for row in rows:
        device = f"{row['device']} (emulated)" if row["emulated"] else str(row["device"])
        certified = str(row["certified"] or "-")
        if certified == "limited":
            certified += f" to {row['certified_limit']} tokens"
        left = row["expires_in_s"]
        unloaded = "by hand" if left is None else f"in {left:.0f} s if idle"
        cells.append((row["name"], megabytes(row["memory"]), device, str(row["context"]), certified, unloaded))
    print(table(("NAME", "MEMORY", "DEVICE", "CONTEXT", "CERTIFIED", "UNLOADED"), cells))
    if faults:
        print(printable(f"This node has faults on demand: {'; '.join(faults)}"))
    return 0


def _stop(args: argparse.Namespace) -> int:
    from worker_node.cli.node_client import model_path, node_or_none, where_no_node_runs

    with node_or_none(args) as node:
        if node is None:
            raise ConfigurationError(f"{where_no_node_runs()}, so nothing is loaded")
        for name in args.models:
            node.call("POST", model_path(name, "unload"))
            print(f"{name}: unloaded")
    return 0


def _rm(args: argparse.Namespace) -> int:
    """Remove each model in turn; the first that fails ends it."""
    from worker_node.cli.node_client import NodeCallFailed, model_path, on_node

    def from_node(node: NodeClient) -> int:
        print(f"removing from the node at {node.url}", file=sys.stderr)
        for name in args.models:
            try:
                node.call("DELETE", model_path(name) + ("?force=true" if args.force else ""))
            except NodeCallFailed as error:
                if error.http_status != HTTPStatus.CONFLICT:
                    raise
                raise NodeCallFailed(
                    f"{name} has requests in flight; wait for their end, or add --force", error.http_status
                ) from None
            print(f"{name}: removed")
        return 0

    def from_store() -> int:
        store = node_store(args)
        print(f"removing from the store {store.root}", file=sys.stderr)
        for name in args.models:
            store.remove(name)
            print(f"{name}: removed")
        return 0

    return on_node(args, from_node, from_store, changes=True)
