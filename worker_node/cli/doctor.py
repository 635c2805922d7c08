"""`npu-node doctor`: whether the node that is installed can serve here, and what its NPU lacks, each with its fix.

It changes nothing. Without --require a missing NPU is a warning: the node serves on its CPU.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from worker_node.cli.serve import add_config
from worker_node.core.errors import ConfigurationError, ModelNotFound
from worker_node.core.operating_system import WINDOWS

if TYPE_CHECKING:
    from worker_node.bounded.settings import BoundedSettings
    from worker_node.devices.probe import Probe
    from worker_node.doctor.machine import Finding
    from worker_node.models.store import ModelStore
    from worker_node.settings import ModelSettings, NodeSettings

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor", help="say whether this machine can serve, and what its NPU lacks", description=__doc__
    )
    add_config(parser)
    parser.add_argument("--profile", choices=("node", "bounded"), default="node", help="bounded: docs/bounded-jobs.md")
    parser.add_argument("--require", choices=("npu",), help="what the NPU lacks is an error")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    import asyncio
    from dataclasses import asdict, replace

    from worker_node.cli.output import documentation, print_json
    from worker_node.cli.serve import load_bounded_settings
    from worker_node.devices.probe import probe
    from worker_node.doctor.checks import check_cpu, examine, healthy
    from worker_node.doctor.machine import ExaminedMachine, Severity, read_kernel_log

    found = asyncio.run(probe())
    node, cache = _node(args, found) if args.profile == "node" else _bounded(load_bounded_settings(args))
    npu = examine(ExaminedMachine(kernel_log=read_kernel_log()), found, cache=cache)
    if args.require is None:
        lesser = {Severity.ERROR: Severity.WARNING}
        npu = tuple(replace(finding, severity=lesser.get(finding.severity, finding.severity)) for finding in npu)
    findings = (check_cpu(found), *node, *npu)
    if args.json:
        report = {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}
        print_json(report)
    else:
        for finding in findings:
            print(f"{_MARKS[finding.severity]}  {finding.id}: {finding.found}")
            if finding.fix:
                print(f"         fix: {finding.fix}")
        if (
            any("docs/" in finding.found + finding.fix for finding in findings)
            and (pages := documentation()) is not None
        ):
            print(f"docs/: {pages}")
        if args.require is None and healthy(findings):
            print("nothing keeps a node from serving here; with --require npu the NPU's warnings are errors")
    return 0 if healthy(findings) else 1


def _node(args: argparse.Namespace, found: Probe) -> tuple[list[Finding], Path]:
    """What is said of the node that `serve` would start, and its compile cache. Raises InvalidSettings."""
    from dataclasses import replace

    from worker_node.cli.serve import node_store, settings_source
    from worker_node.doctor.checks import check_models, check_port, check_secret
    from worker_node.doctor.machine import error, ok, warning
    from worker_node.settings import InvalidSettings

    source = settings_source(args)
    findings = [ok("settings", str(source.config or "no file: defaults and NPU_NODE_*"))]
    try:
        settings = source.read()
    except InvalidSettings as refused:
        # Its keys may come from the environment of its unit.
        settings = replace(source, flags={"allow_unauthenticated": True}).read()
        fix = "set api_keys_file"
        if not WINDOWS:
            fix = "none if the service's unit has the keys (systemctl cat npu-node); else set api_keys_file"
        findings.append(warning("api-keys", refused.problems[0].message, fix))
    try:
        store = node_store(args)
        problems = {model.name: _problem(model, store, found.openvino or "") for model in settings.models}
        findings += check_models(store.root, problems)
        findings += _memory([model for model in settings.models if problems[model.name] is None], settings, found)
    except ConfigurationError as problem:
        findings.append(error("model-store", problem.message, "run doctor as the node's user, or set model_store"))
    secrets = (settings.api_keys_file, settings.tls_key or settings.tls_cert)
    findings += [check_secret(file.expanduser()) for file in secrets if file is not None]
    ports = [port for port in (settings.port, settings.ollama_port) if port is not None]
    findings += [check_port(settings.host, port, answered=_answers(settings, port)) for port in ports]
    return findings, settings.compile_cache.expanduser()


def _bounded(settings: BoundedSettings) -> tuple[list[Finding], Path]:
    """What is said of the bounded profile's model, and its compile cache; `npu-node smoke` runs the model."""
    from worker_node.bounded.service import REFERENCE_MODEL, choose_model, reservation
    from worker_node.doctor.machine import error, ok, warning
    from worker_node.models.store import ModelStore

    choice = choose_model(settings.model, ModelStore(), settings.weights.split(","))
    found = f"{choice.path} ({choice.why})"
    if choice.problem is not None:
        finding = error("model-files", choice.problem, "pull the model, or correct OV_GENAI_NPU_MODEL")
    elif (doubt := reservation(choice)) is not None:
        finding = warning("model-files", doubt, f"npu-node pull {REFERENCE_MODEL}")
    else:
        finding = ok("model-files", found)
    return [finding], settings.cache.expanduser()


def _problem(wanted: ModelSettings, store: ModelStore, openvino: str) -> tuple[str, str] | None:
    """What keeps a model from being served, and the fix; an encoder's directory is prepared by the node, not here."""
    from worker_node.models.directory import runtime_problem

    try:
        path = store.get(wanted.name).path if wanted.path is None else wanted.path.expanduser()
        if not path.is_dir():
            return f"{wanted.name}: {wanted.path} is not a directory", "correct path in [[models]]"
        newer = None if wanted.allow_known_bad else runtime_problem(path, openvino)
        if newer is not None:
            return newer, "update the node, or export the model again with that version"
    except ModelNotFound:
        fix = f"npu-node pull {wanted.name} --model-store {shlex.quote(str(store.root))}"
        return f"{wanted.name} is not installed in {store.root}", fix
    except ConfigurationError as damage:
        return f"{wanted.name}: {damage.message}", f"npu-node rm {wanted.name}, then pull it again"
    return None


def _memory(models: Sequence[ModelSettings], settings: NodeSettings, found: Probe) -> Iterator[Finding]:
    """What each model that has a prompt takes of memory with its window, and how long prompts may be there."""
    from worker_node.core.types import ModelKind
    from worker_node.devices.npu import npu_source
    from worker_node.doctor.machine import error, ok, warning
    from worker_node.models.store import ModelStore
    from worker_node.serving.build import HOST, Machine, installed_model, memory_budgets, plan_model
    from worker_node.serving.task import served_task

    budget = memory_budgets(settings.memory_budget, found)[HOST] or 0
    with npu_source(settings.npu_sysfs, emulated=settings.npu_emulation) as npu:
        machine = Machine(settings, found, npu)
    for wanted in models:
        try:
            installed = installed_model(wanted, ModelStore(settings.model_store), settings)
            if installed.kind != ModelKind.GENERATION:
                continue
            plans, _ = plan_model(served_task(installed.kind), installed, wanted, machine)
        except ConfigurationError as problem:
            yield error("model-memory", problem.message, f"correct {wanted.name} in [[models]]")
            continue
        for plan in plans:
            taken, limit, device = plan.engine.memory, plan.engine.prompt_limit, plan.target.device
            said = f"{wanted.name} on {device} takes about {taken / 1e9:.1f} GB, with prompts of up to {limit} tokens"
            if taken <= budget:
                yield ok("model-memory", said)
            else:
                fix = "lower max_prompt_len, take a smaller model, or free memory"
                yield warning("model-memory", f"{said}; engines may take {budget / 1e9:.1f} GB", fix)


def _answers(settings: NodeSettings, port: int) -> bool:
    """Whether a node serves on the port; its certificate is not examined, since no key is sent."""
    import ssl

    from worker_node.cli.node_client import NodeCallFailed, NodeClient
    from worker_node.cli.serve import reachable

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    client = NodeClient(reachable(f"http{'s' * bool(settings.tls_cert)}://{host}:{port}"), None, context)
    try:
        return client.live_status() == 200
    except NodeCallFailed:
        # Another scheme; or it asks for a client's certificate, as this node does then.
        return settings.tls_client_ca is not None
    finally:
        client.close()
