"""`npu-client embed` and `npu-client generate`: one call each."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from backend_client.client import InferenceClient
from backend_client.results import CallOptions, GenerateResult
from backend_client.settings import ClientSettings


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
