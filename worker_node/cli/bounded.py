"""The bounded jobs in this process, with the proof that the NPU ran them: `run --job`, `smoke` and `bench --jobs`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from worker_node.cli.output import say
from worker_node.core.errors import BadRequest, InternalError, NodeError

if TYPE_CHECKING:
    from worker_node.bounded.service import JobService

DEFAULT_PROMPT = "What is the capital of France?"

T = TypeVar("T")
_Commands = argparse._SubParsersAction  # noqa: SLF001


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `npu-node run` that name a bounded job in place of a model."""
    group = parser.add_argument_group("a bounded job, in this process and with the proof that the NPU ran it")
    group.add_argument("--job", help="title, summary, notification or memory_candidate, in place of MODEL")
    group.add_argument("--input", help="the text, or - to read it from standard input")
    group.add_argument("--max-new-tokens", type=int, help="1 to 256; default: the job's own")
    group.add_argument("--json", action="store_true", help="on one line")


def add_smoke(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "smoke", help="prove that the NPU generates", description="Prove on this machine that the NPU generates."
    )
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what is asked; it is not put on record")
    parser.add_argument("--max-new-tokens", type=int, help="1 to 256; default: 24")
    parser.add_argument("--json", action="store_true", help="the record as JSON")
    parser.set_defaults(run=_smoke)


def add_bench(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench", help="measure the bounded jobs", description="Measure the bounded jobs against their limits."
    )
    parser.add_argument("--jobs", action="store_true", required=True, help="the bounded jobs, cold and warm")
    parser.add_argument("--repeat", type=int, default=5, help="how often each job is run; default: 5")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(run=_bench)


def run_job(args: argparse.Namespace) -> int:
    """Print the result; 0 only if the job succeeded and the NPU's busy counter proves that the NPU ran it."""
    import orjson

    from worker_node.bounded.jobs import make_request

    text = args.input
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise BadRequest("standard input is not UTF-8") from None
    request = make_request(args.job, text, args.max_new_tokens)
    result = with_service(args, lambda service: service.run(request))
    shown = result.payload if result.error is None else result.payload | {"error": result.error}
    print(orjson.dumps(shown, option=0 if args.json else orjson.OPT_INDENT_2).decode())
    if result.error is not None:
        say(result.error)
    return 0 if result.error is None else 1


def _smoke(args: argparse.Namespace) -> int:
    """Print the record; 0 only if the NPU's busy counter proves the generation."""
    from worker_node.bounded.jobs import SMOKE, bounded
    from worker_node.bounded.service import smoke
    from worker_node.cli.output import print_json

    request = bounded(SMOKE, args.prompt, args.max_new_tokens)
    facts = with_service(args, lambda service: smoke(service, request))
    if args.json:
        print_json(facts)
    else:
        for name, value in facts.items():
            if name != "warnings":
                print(f"{name:<20}{'unknown' if value is None else value}")
    for warning in facts["warnings"]:
        say(f"warning: {warning}")
    return 0 if facts["verdict"] == "pass" else 1


def _bench(args: argparse.Namespace) -> int:
    """Print the figures; 1 if a job failed, or, where the figures are evidence, one is beyond its limit."""
    from worker_node.bounded.service import PUBLISHED_NAME, measure_jobs
    from worker_node.cli.output import print_json

    if args.repeat < 1:
        args.parser.error("--repeat is at least 1")
    figures = with_service(args, lambda service: measure_jobs(service, args.repeat))
    if args.json:
        print_json(figures)
    else:
        print(f"{figures['model']}, first generation {figures['cold_first_s']} s (limit {figures['cold_limit_s']:g})")
        for name, job in figures["jobs"].items():
            print(f"{name:<18}p50 {job['p50_s']:>6} s   p95 {job['p95_s']:>6} s   limit {job['limit_s']:g} s")
        for problem in figures["problems"]:
            print(problem)
    if figures["accepted"] is None:
        spite = (
            "; what is above is no failure (exit status 0)" if figures["problems"] and not figures["failures"] else ""
        )
        say(f"no evidence: the limits are for {PUBLISHED_NAME} on a real NPU{spite}")
    return 1 if figures["accepted"] is False or figures["failures"] else 0


def with_service(args: argparse.Namespace, work: Callable[[JobService], Awaitable[T]]) -> T:
    """Return what `work` makes of a service that lives as long as it does.

    Raises NodeError; an unexpected failure becomes one that shows its type only, since its text might hold what was
    given or generated.
    """
    from worker_node.bounded.profile import job_service
    from worker_node.cli.serve import load_bounded_settings

    settings = load_bounded_settings(args)

    async def run() -> T:
        async with job_service(settings) as service:
            return await work(service)

    try:
        return asyncio.run(run())
    except NodeError:
        raise
    except Exception as error:  # noqa: BLE001  (see above)
        raise InternalError(f"failed with {type(error).__name__}; its text is hidden, it may hold the input") from None
