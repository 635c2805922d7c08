"""`npu-node convert`: put a local model into the store."""

from __future__ import annotations

import argparse
from pathlib import Path

from worker_node.commands.progress import progress_display
from worker_node.models.catalog import CONVERTED_FORMS, Quantization
from worker_node.models.store import ModelStore
from worker_node.registry import tasks


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "convert", help="convert a GGUF file, or a directory of safetensors or OpenVINO files"
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="the file or directory; it is left as it is")
    parser.add_argument("--name", help="how the model is to be called (default: as the file or directory)")
    parser.add_argument("--kind", choices=list(tasks()), help="refuse files of the other kind")
    parser.add_argument(
        "--quantization",
        choices=[form.value for form in CONVERTED_FORMS],
        help="how to store the weights of a GGUF file, or of an encoder (f32, int8_sym)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert and install."""
    with progress_display(str(args.source)) as progress:
        model = ModelStore().convert(
            args.source,
            args.name,
            progress,
            kind=args.kind,
            quantization=Quantization(args.quantization) if args.quantization else None,
        )
    print(f"{model.id}: {model.kind}, ready, {model.size / 1e6:.0f} MB in {model.path}")
    return 0
