"""`npu-node smoke`: prove on this machine that the NPU generates."""

from __future__ import annotations

import argparse
import sys

DEFAULT_PROMPT = "What is the capital of France?"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser("smoke", help="prove that the NPU generates", description=__doc__)
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what is asked; it is not put on record")
    parser.add_argument("--max-new-tokens", type=int, help="1 to 256; default: 24")
    parser.add_argument("--json", action="store_true", help="the record as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the record; 0 only if the NPU's busy counter proves the generation."""
    import orjson

    from worker_node.bounded.jobs import SMOKE, bounded
    from worker_node.bounded.proof import smoke
    from worker_node.commands.job_service import with_service

    request = bounded(SMOKE, args.prompt, args.max_new_tokens)
    record = with_service(args, lambda service: smoke(service, request))
    if args.json:
        print(orjson.dumps(record.facts, option=orjson.OPT_INDENT_2).decode())
    else:
        for name, value in record.facts.items():
            if name != "warnings":
                print(f"{name:<20}{'unknown' if value is None else value}")
    for warning in record.facts["warnings"]:
        print(f"npu-node: warning: {warning}", file=sys.stderr)
    return 0 if record.passed else 1
