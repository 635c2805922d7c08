"""`npu-node bench --jobs`: measure the bounded jobs against what is accepted."""

from __future__ import annotations

import argparse
import sys


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser("bench", help="measure the bounded jobs", description=__doc__)
    parser.add_argument("--jobs", action="store_true", required=True, help="the bounded jobs, cold and warm")
    parser.add_argument("--repeat", type=int, default=5, help="how often each job is run; default: 5")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the figures; 1 if a job failed, or, where the figures are evidence, one is beyond its limit."""
    import orjson

    from worker_node.bounded.proof import measure_jobs
    from worker_node.commands.job_service import with_service

    if args.repeat < 1:
        args.parser.error("--repeat is at least 1")
    report = with_service(args, lambda service: measure_jobs(service, args.repeat))
    figures = report.figures
    if args.json:
        print(orjson.dumps(figures | {"accepted": report.accepted}, option=orjson.OPT_INDENT_2).decode())
    else:
        print(f"{figures['model']}, first generation {figures['cold_first_s']} s (limit {figures['cold_limit_s']:g})")
        for name, job in figures["jobs"].items():
            print(f"{name:<18}p50 {job['p50_s']:>6} s   p95 {job['p95_s']:>6} s   limit {job['limit_s']:g} s")
        for problem in figures["problems"]:
            print(problem)
    if report.accepted is None:
        print("npu-node: no evidence: the limits are for the reference model on a real NPU", file=sys.stderr)
    return 1 if report.accepted is False or figures["failures"] else 0
