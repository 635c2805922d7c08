"""`npu-client`: its parser, the commands `health`, `embed` and `generate`, and errors as one line on stderr."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import errno
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from backend_client.client import InferenceClient, NodeStatus, NPUClient
from backend_client.errors import ConfigurationError, NPUError
from backend_client.http.messages import ModelReport
from backend_client.results import CallOptions, GenerateResult
from backend_client.settings import CONFIG_VARIABLE, ClientSettings

_REMEDIES = {
    errno.ENOSPC: "free some space, or write to a larger disk",
    errno.EDQUOT: "free some space, or write to a larger disk",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a file or directory that this user may use",
    errno.EPERM: "choose a file or directory that this user may use",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENETUNREACH: "check the network and the node's address",
    errno.EADDRINUSE: "choose another --port",
}


def sentence(error: OSError) -> str:
    """What happened, where, and what to do about it."""
    where = f"{error.filename}: " if error.filename else ""
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{reason}" + (f"; {remedy}" if remedy else "")


# Ends a command: errors as one sentence on standard error, and an exit status.


class WrongUsage(ConfigurationError):
    """The values of a command's flags make no sense."""


def reported(work: Callable[[], int], program: str = "npu-client") -> int:
    """The status of `work`, or that of the error it raised: 1 with a message, 2 for WrongUsage, 130 interrupted."""
    try:
        return work()
    except WrongUsage as error:
        return _fail(program, error.message, 2)
    except NPUError as error:
        return _fail(program, error.message)
    except KeyboardInterrupt:
        return _fail(program, "interrupted", 130)
    except BrokenPipeError:
        # As `npu-client embed | head`: the reader of our output has seen enough.
        _drop_output()
        return 141  # as the shell says of one that SIGPIPE ended
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:  # such as a full disk: what is left of the output would be written again at exit
            _drop_output()
        return _fail(program, sentence(error))


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(program: str, message: str, status: int = 1) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status


# The modules of further commands.
MODULES = ("dashboard", "dataset")


class _Parser(argparse.ArgumentParser):
    """Names the nearest command, option or choice in its errors, as argparse does from Python 3.14 on.

    What a command does not know is the whole parser's error, so that one looks at the options of all `commands`.
    """

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"(?:invalid choice: '|unrecognized arguments: )([\w.-]+)(.*)", message):
            offered = re.findall(r"[\w.-]+", wrong[2].partition("choose from")[2])
            helps = "".join(parser.format_help() for parser in (self, *self.commands.values()))
            near = difflib.get_close_matches(wrong[1], offered or re.findall(r"--[\w-]+", helps), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="npu-client",
        description="Call NPU nodes. Settings come from flags, then NPU_CLIENT_* in the environment, then the file.",
    )
    parser.add_argument("--version", action="version", version=f"npu-client {_version()}")
    _add_settings(parser)
    # Without a command the help is shown: a first look is not a mistake.
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_calls(subparsers)
    for name in MODULES:
        importlib.import_module(f"backend_client.cli.{name}").add_parser(subparsers)
    parser.commands = subparsers.choices
    for command in subparsers.choices.values():
        _add_settings(command.add_argument_group("settings, here or before the command"), "_behind")
    return parser


def _add_settings(parser: argparse._ActionsContainer, suffix: str = "") -> None:
    """The flags that may stand before the command and behind it: what is behind has names of its own, with `suffix`."""
    add = parser.add_argument
    add("--config", dest=f"config{suffix}", type=Path, help=f"TOML file (else the one {CONFIG_VARIABLE} names)")
    add("--node", dest=f"nodes{suffix}", action="append", metavar="URL", help="a node; may be given again")
    add("--local-only", dest=f"local_only{suffix}", action="store_true", default=None, help="never ask the cloud")


def _settings(args: argparse.Namespace) -> ClientSettings:
    """The settings, with the flags: what stands behind the command is nearer, and all nodes count."""
    flags: dict[str, Any] = {}
    if args.nodes or args.nodes_behind:
        flags["nodes"] = [*(args.nodes or ()), *(args.nodes_behind or ())]
    if args.local_only or args.local_only_behind:
        flags["local_only"] = True
    return ClientSettings.load(args.config_behind or args.config, **flags)


def _version() -> str:
    try:
        return version("npu-node")
    except PackageNotFoundError:
        return "(not installed as a package)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted.

    The commands for data sets have more: see `backend_client.bulk.ExitCode`.
    """
    return reported(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help()
        return 0
    status: int = asyncio.run(args.run(args, _settings(args)))
    if sys.stdout is not None:
        # Closed by the caller (>&-). The installed commands never get here: `npu_commands` opens it on /dev/null.
        sys.stdout.flush()
    return status


def _add_calls(commands: argparse._SubParsersAction[_Parser]) -> None:
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
    energy = "" if result.joules is None else f", {result.joules:.3g} J"
    return f"{result.model} on {where}{emulated}: {usage}{rate}{busy}{energy}, {result.finish_reason}"


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
    """The table, and a line for each thing to know of a node: trouble, faults on demand, what is not as certified."""
    rows = [row for node in nodes for row in _rows(node)]
    remarks = [f"{node.url}: {remark}" for node in nodes for remark in (_trouble(node), *_remarks(node)) if remark]
    return "\n".join([table(_HEAD, rows), *remarks])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)


def _remarks(node: NodeStatus) -> Iterator[str]:
    if node.faults:
        yield f"has faults on demand: {'; '.join(node.faults)}"
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
    return json.dumps([asdict(node) for node in nodes], indent=2, default=BaseModel.model_dump)
