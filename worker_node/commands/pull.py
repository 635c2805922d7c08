"""`npu-node pull`: put models into the store."""

from __future__ import annotations

import argparse

from worker_node.commands.progress import progress_display
from worker_node.models.catalog import Catalog, Quantization
from worker_node.models.store import ModelStore


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("pull", help="download, verify and convert models of the catalog")
    parser.add_argument("names", nargs="*", metavar="NAME", help="id or alias, see: npu-node models")
    parser.add_argument("--embedded", action="store_true", help="the models that every node starts with")
    parser.add_argument(
        "--quantization",
        choices=[form.value for form in Quantization],
        help="how to store the weights of GGUF models",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Pull each model in turn; what is installed already is not fetched again."""
    catalog = Catalog.load()
    names = [entry.id for entry in catalog.embedded() if args.embedded] + [catalog.resolve(n).id for n in args.names]
    if not names:
        args.parser.error("name at least one model, or give --embedded")
    store = ModelStore(catalog=catalog)
    quantization = Quantization(args.quantization) if args.quantization else None
    for name in dict.fromkeys(names):
        with progress_display(name) as progress:
            model = store.pull(name, progress, quantization=quantization)
        print(f"{model.id}: ready, {model.size / 1e6:.0f} MB in {model.path}", flush=True)
    return 0
