"""`npu-client embed`: embed texts given as arguments, or the lines of standard input."""

from __future__ import annotations

import argparse
import json
import sys

from backend_client.commands.common import add_call_options, call_options
from backend_client.fallback import InferenceClient
from backend_client.settings import ClientSettings


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("embed", help="embed texts", description=__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; without any, each line of standard input")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    add_call_options(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Print one JSON object a text, in their order, and who embedded them on standard error."""
    texts = args.texts or [line.rstrip("\n") for line in sys.stdin]
    async with InferenceClient.from_settings(settings) as client:
        result = await client.embed_many_result(texts, truncate=args.truncate, **call_options(args))
    for index, vector in enumerate(result.vectors):
        print(json.dumps({"index": index, "space": result.space, "embedding": vector.tolist()}))
    served = ", ".join(f"{count} by {node}" for node, count in result.served.items())
    print(f"{len(texts)} texts, {result.usage.prompt_tokens} tokens: {served}", file=sys.stderr)
    return 0
