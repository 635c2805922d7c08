"""`npu-node doctor`: whether this machine can serve, and what its NPU lacks, each with its fix. It changes nothing.

Without --require a missing NPU is a warning: the node serves on its CPU.
"""

from __future__ import annotations

import argparse
import subprocess

from worker_node.core.environment import native_environment

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "doctor", help="say whether this machine can serve, and what its NPU lacks", description=__doc__
    )
    parser.add_argument("--require", choices=("npu",), help="what the NPU lacks is an error")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    """Print the findings; 0 if none is an error."""
    import asyncio
    from dataclasses import asdict

    from worker_node.bounded.service import choose_model
    from worker_node.cli.output import print_json
    from worker_node.cli.serve import load_bounded_settings
    from worker_node.devices.probe import probe
    from worker_node.doctor.checks import examine, for_any_device, healthy
    from worker_node.doctor.machine import ExaminedMachine
    from worker_node.models.store import ModelStore

    settings = load_bounded_settings(args)
    choice = choose_model(settings.model, ModelStore())
    found = asyncio.run(probe())
    findings = examine(
        ExaminedMachine(kernel_log=_kernel_log()),
        found,
        model=choice.path,
        model_problem=choice.problem,
        cache=settings.cache.expanduser(),
    )
    if args.require is None:
        findings = for_any_device(findings, found)
    if args.json:
        report = {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}
        print_json(report)
    else:
        for finding in findings:
            print(f"{_MARKS[finding.severity]}  {finding.id}: {finding.found}")
            if finding.fix:
                print(f"         fix: {finding.fix}")
        if args.require is None and healthy(findings):
            print("nothing keeps a node from serving here; with --require npu the NPU's warnings are errors")
    return 0 if healthy(findings) else 1


def _kernel_log() -> str | None:
    """What dmesg shows; None where it is missing or this user may not read it."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=10, check=True, env=native_environment())  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
