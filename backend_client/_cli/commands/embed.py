"""`npu-client embed`: embed texts given as arguments, the lines of standard input, or a file.

With --in and --out it can be interrupted and started again: what is done is kept beside the output until all is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from backend_client._api.inference_client import InferenceClient
from backend_client._cli.commands.common import add_call_options, call_options
from backend_client._cli.commands.embed_file import EmbedFile
from backend_client.errors import ConfigurationError
from backend_client.settings import ClientSettings


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("embed", help="embed texts", description=__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; without any, each line of standard input")
    parser.add_argument(
        "--in", type=Path, dest="source", metavar="FILE", help="JSON lines (a string, or an object with text) or .txt"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=".npy, .jsonl or .parquet")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    add_call_options(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Embed into the file, or print one JSON object a text; who embedded them goes to standard error."""
    if (args.source is None) != (args.out is None) or (args.source is not None and args.texts):
        raise ConfigurationError("embed takes TEXTs, or --in and --out together")
    if args.source is not None:
        work = EmbedFile(args.source, args.out)
        spaces = settings.spaces | work.space_to_continue()
        async with InferenceClient.from_settings(settings.model_copy(update={"spaces": spaces})) as client:
            await work.run(client, truncate=args.truncate, **call_options(args))
        return 0
    texts = args.texts or [line.rstrip("\n") for line in sys.stdin]
    async with InferenceClient.from_settings(settings) as client:
        result = await client.embed_many_result(texts, truncate=args.truncate, **call_options(args))
    for index, vector in enumerate(result.vectors):
        print(json.dumps({"index": index, "space": result.space, "embedding": vector.tolist()}))
    served = ", ".join(f"{count} by {node}" for node, count in result.served.items())
    print(f"{len(texts)} texts, {result.usage.prompt_tokens} tokens: {served}", file=sys.stderr)
    return 0
