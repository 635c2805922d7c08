"""`npu-client generate`: answer a prompt, printing it as it comes."""

from __future__ import annotations

import argparse
import sys

from backend_client.cli.flags import add_call_options, add_sampling, call_options, sampling
from backend_client.client import InferenceClient
from backend_client.results import GenerateResult
from backend_client.settings import ClientSettings


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="answer a prompt", description=__doc__)
    parser.add_argument("prompt", nargs="*", help="the prompt; without one, standard input")
    parser.add_argument("--max-new-tokens", type=int)
    add_sampling(parser)
    parser.add_argument("--raw", action="store_true", default=None, help="skip the model's chat template")
    add_call_options(parser)
    parser.set_defaults(run=run, parser=parser)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Print the answer on standard output, what it took on standard error."""
    prompt = " ".join(args.prompt) or ("" if sys.stdin.isatty() else sys.stdin.read())
    if not prompt.strip():
        args.parser.error("a prompt is needed: as arguments, or on standard input")
    options = sampling(args, "max_new_tokens", "raw")
    async with (
        InferenceClient.from_settings(settings) as client,
        client.stream(prompt, **options, **call_options(args)) as stream,
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
