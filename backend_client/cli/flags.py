"""Flags that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from backend_client.results import CallOptions


def add_call_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model; else the nodes' default")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole call")
    parser.add_argument("--priority", choices=("interactive", "batch"), default="interactive")
    parser.add_argument("--require-device", choices=("NPU", "GPU", "CPU"), help="no other device may run it")


def call_options(args: argparse.Namespace) -> CallOptions:
    return CallOptions(
        model=args.model, timeout=args.timeout, priority=args.priority, require_device=args.require_device
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The options of generation that are named alike everywhere."""
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="end the answer before this; may be given again")


def sampling(args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The options of generation that were given, and `more` of them."""
    names = (*more, "temperature", "top_p", "top_k", "seed", "stop")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


# Plain text tables.


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)
