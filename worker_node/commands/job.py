"""`npu-node job`: one bounded job in this process, with the proof that the NPU ran it."""

from __future__ import annotations

import argparse
import sys

from worker_node.core.errors import BadRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser("job", help="run one bounded job", description=__doc__)
    add_options(parser, required=True)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Declare what describes a job; not `required` and not shown for `npu-node run`, its old spelling."""

    def shown(text: str) -> str:
        return text if required else argparse.SUPPRESS

    parser.add_argument("--job", required=required, help=shown("title, summary, notification or memory_candidate"))
    parser.add_argument("--input", required=required, help=shown("the text, or - to read it from standard input"))
    parser.add_argument("--max-new-tokens", type=int, help=shown("1 to 256; default: the job's own"))
    parser.add_argument("--json", action="store_true", help=shown("on one line"))


def run(args: argparse.Namespace) -> int:
    """Print the result; 0 only if the job succeeded and the NPU's busy counter proves that the NPU ran it."""
    import orjson

    from worker_node.bounded.jobs import make_request
    from worker_node.commands.job_service import with_service

    request = make_request(args.job, _text(args.input), args.max_new_tokens)
    result = with_service(args, lambda service: service.run(request))
    shown = result.payload if result.error is None else result.payload | {"error": result.error}
    print(orjson.dumps(shown, option=0 if args.json else orjson.OPT_INDENT_2).decode())
    if result.error is not None:
        print(f"npu-node: {result.error}", file=sys.stderr)
    return 0 if result.error is None else 1


def _text(given: str) -> str:
    if given != "-":
        return given
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise BadRequest("standard input is not UTF-8") from None
