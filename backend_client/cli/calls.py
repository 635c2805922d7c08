"""`npu-client health`, `embed` and `generate`: one call each."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from backend_client.client import InferenceClient, NodeStatus, NPUClient
from backend_client.http.health import ModelReport
from backend_client.results import CallOptions, GenerateResult
from backend_client.settings import ClientSettings


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "health",
        help="show what every node says of itself",
        description="A table of the nodes, as this client sees them.",
    )
    parser.add_argument("--watch", action="store_true", help="again and again, until interrupted")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (2)")
    parser.add_argument("--json", action="store_true", help="one JSON document a look")
    parser.set_defaults(run=health)

    parser = commands.add_parser("embed", help="embed texts given as arguments, or the lines of standard input")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; without any, each line of standard input")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    _add_call_options(parser)
    parser.set_defaults(run=embed)

    parser = commands.add_parser("generate", help="answer a prompt, printing the answer as it comes")
    parser.add_argument("prompt", nargs="*", help="the prompt; without one, standard input")
    parser.add_argument("--max-new-tokens", type=int)
    add_sampling(parser)
    parser.add_argument("--raw", action="store_true", default=None, help="skip the model's chat template")
    _add_call_options(parser)
    parser.set_defaults(run=generate, parser=parser)


def _add_call_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model; else the nodes' default")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole call")
    parser.add_argument("--priority", choices=("interactive", "batch"), default="interactive")
    parser.add_argument("--require-device", choices=("NPU", "GPU", "CPU"), help="no other device may run it")


def _call_options(args: argparse.Namespace) -> CallOptions:
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


async def embed(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Print one JSON object a text; who embedded them goes to standard error."""
    texts = args.texts or [line.rstrip("\n") for line in sys.stdin]
    async with InferenceClient.from_settings(settings) as client:
        result = await client.embed_many_result(texts, truncate=args.truncate, **_call_options(args))
    for index, vector in enumerate(result.vectors):
        print(json.dumps({"index": index, "space": result.space, "embedding": vector.tolist()}))
    served = ", ".join(f"{count} by {node}" for node, count in result.served.items())
    print(f"{len(texts)} texts, {result.usage.prompt_tokens} tokens: {served}", file=sys.stderr)
    return 0


async def generate(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Print the answer on standard output, what it took on standard error."""
    prompt = " ".join(args.prompt) or ("" if sys.stdin.isatty() else sys.stdin.read())
    if not prompt.strip():
        args.parser.error("a prompt is needed: as arguments, or on standard input")
    options = sampling(args, "max_new_tokens", "raw")
    async with (
        InferenceClient.from_settings(settings) as client,
        client.stream(prompt, **options, **_call_options(args)) as stream,
    ):
        async for piece in stream:
            print(piece, end="", flush=True)
        print()
        if stream.result is not None:
            print(summary(stream.result), file=sys.stderr)
    return 0


def summary(result: GenerateResult) -> str:
    where = f"{result.device} of {result.node}" if result.device else result.node
    emulated = " (emulated)" if result.emulated else ""
    usage = f"{result.usage.prompt_tokens} + {result.usage.completion_tokens} tokens"
    rate = ""
    if result.timing.generate:
        rate = f", {result.usage.completion_tokens / result.timing.generate * 1000:.0f} tokens/s"
    busy = "" if result.npu_busy_delta_us is None else f", NPU busy {result.npu_busy_delta_us / 1000:.1f} ms"
    return f"{result.model} on {where}{emulated}: {usage}{rate}{busy}, {result.finish_reason}"


_HEAD = ("NODE", "STATUS", "MODEL", "STATE", "DEVICE", "QUEUE", "RUNNING", "SPACE")
# Most placements were never certified, and those that were work as they are configured.
_REMARKABLE = frozenset({"limited", "failed", "expired"})
_CLEAR = "\x1b[2J\x1b[H"


async def health(args: argparse.Namespace, settings: ClientSettings) -> int:
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
