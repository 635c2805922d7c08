"""`npu-client health`: a table of the nodes, as this client sees them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from backend_client.client import NodeStatus, NPUClient
from backend_client.http.health import ModelReport
from backend_client.settings import ClientSettings

_HEAD = ("NODE", "STATUS", "MODEL", "STATE", "DEVICE", "QUEUE", "RUNNING", "SPACE")
# Most placements were never certified, and those that were work as they are configured.
_REMARKABLE = frozenset({"limited", "failed", "expired"})
_CLEAR = "\x1b[2J\x1b[H"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("health", help="show what every node says of itself", description=__doc__)
    parser.add_argument("--watch", action="store_true", help="again and again, until interrupted")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (2)")
    parser.add_argument("--json", action="store_true", help="one JSON document a look")
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Print the table; 0 when a node can serve, 1 when none can."""
    async with NPUClient.from_settings(settings) as client:
        nodes = await client.health()
        while args.watch:
            shown = _json(nodes) if args.json else render(nodes)
            print((_CLEAR if sys.stdout.isatty() and not args.json else "") + shown, flush=True)
            await asyncio.sleep(args.interval)
            nodes = client.status()
        print(_json(nodes) if args.json else render(nodes))
    return 0 if any(node.usable for node in nodes) else 1


def render(nodes: tuple[NodeStatus, ...]) -> str:
    """The table, and a line for each thing to know of a node: trouble, what is not as certified."""
    rows = [row for node in nodes for row in _rows(node)]
    remarks = [f"{node.url}: {remark}" for node in nodes for remark in (_trouble(node), *_remarks(node)) if remark]
    return "\n".join([table(_HEAD, rows), *remarks])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)


def _remarks(node: NodeStatus) -> Iterator[str]:
    for name, why in node.ejected.items():
        yield f"{name} is ejected: {why}"
    for model in node.models:
        for placed in (*model.engines, *model.excluded):
            if placed.certified in _REMARKABLE:
                on = f"{placed.device} (emulated)" if placed.emulated else placed.device
                yield f"{model.id} on {on}: {placed.certified}, {placed.certified_reason}"


def _trouble(node: NodeStatus) -> str | None:
    """What keeps the node, or its answer, from being seen. To strangers a node says its status and nothing else."""
    if node.trouble or node.version is None or node.models or node.devices:
        return node.trouble
    return "does not know this client's API key: check NPU_CLIENT_API_KEY"


def _rows(node: NodeStatus) -> list[tuple[str, ...]]:
    if node.status == "unreachable" or not node.models:
        return [(node.url, node.status, *["-"] * (len(_HEAD) - 2))]
    emulated = {device.name for device in node.devices if device.emulated}
    return [
        (node.url if first else "", node.status if first else "", *_model_cells(model, emulated))
        for first, model in zip([True] + [False] * len(node.models), node.models, strict=False)
    ]


def _model_cells(model: ModelReport, emulated: set[str]) -> tuple[str, ...]:
    device = model.device or "-"
    return (
        model.id,
        model.state,
        f"{device} (emulated)" if device in emulated else device,
        str(model.queue_depth),
        str(model.in_flight),
        (model.space or "-")[:12],
    )


def _json(nodes: tuple[NodeStatus, ...]) -> str:
    def plain(node: NodeStatus) -> dict[str, Any]:
        fields = {
            "models": [model.model_dump() for model in node.models],
            "devices": [device.model_dump() for device in node.devices],
        }
        return asdict(node) | fields

    return json.dumps([plain(node) for node in nodes], indent=2)
