"""`npu-node models`: what there is, and what of it is installed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import msgspec

from worker_node.commands.tables import megabytes, table
from worker_node.core.errors import ConfigurationError
from worker_node.models.catalog import CatalogEntry
from worker_node.models.directory import read_directory
from worker_node.models.manifest import InstalledModel
from worker_node.models.store import ModelStore


@dataclass(frozen=True, slots=True)
class Row:
    """One model; `size` in bytes on disk, `context` in tokens, `state` is installed, available or what is wrong."""

    name: str
    kind: str
    state: str
    size: int | None
    context: int | None
    quantization: str | None
    aliases: tuple[str, ...]
    licence: str
    source: str
    run_here: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("models", help="list the models of the catalog and of the store")
    parser.add_argument("--json", action="store_true", help="as JSON, one array")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the list; a damaged model is shown as such and does not stop the others."""
    store = ModelStore()
    rows = list_models(store)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return 0
    print(_table(rows))
    print(f"\nstore: {store.root}")
    return 0


def list_models(store: ModelStore) -> list[Row]:
    """The catalog's models first, then what else is in the store."""
    directories = {path.name: path for path in store.directories()}
    rows = [_row(entry.id, directories.pop(entry.id, None), entry) for entry in store.catalog]
    return rows + [_row(name, path, None) for name, path in directories.items()]


def _row(name: str, directory: Path | None, entry: CatalogEntry | None) -> Row:
    state, model = "available", None
    if directory is not None:
        try:
            state, model = "installed", read_directory(directory)
        except ConfigurationError as error:
            state = f"damaged: {error.message}"
    known: CatalogEntry | InstalledModel | None = model or entry
    return Row(
        name=name,
        kind=str(known.kind) if known else "unknown",
        state=state,
        size=model.size if model else None,
        context=known.context_limit if known else None,
        quantization=str(known.quantization) if known else None,
        aliases=entry.aliases if entry else (),
        licence=known.licence if known else "unknown",
        source=str(known.source) if known else "unknown",
        run_here=entry.run_here if entry else "nothing",
    )


def _table(rows: list[Row]) -> str:
    head = ("NAME", "KIND", "STATE", "SIZE", "CONTEXT", "WEIGHTS", "LICENCE", "RUN HERE", "ALIASES", "SOURCE")
    cells = [
        (
            row.name,
            row.kind,
            row.state.partition(":")[0],
            megabytes(row.size),
            "" if row.context is None else str(row.context),
            row.quantization or "",
            row.licence,
            row.run_here,
            ", ".join(row.aliases[:3]),
            row.source,
        )
        for row in rows
    ]
    damage = [f"{row.name}: {row.state}" for row in rows if row.state.startswith("damaged")]
    return "\n".join([table(head, cells), *damage])
