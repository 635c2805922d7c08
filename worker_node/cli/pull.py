"""Bring models into the store: `pull`.

The node of NPU_NODE_URL pulls; without one this process does in the store of --model-store or
NPU_NODE_MODEL_STORE; without these the local node does, or, where none runs or an option needs it, this process.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_node.cli.output import TOY_MODEL, TOY_NOTE, print_json, progress_display
from worker_node.cli.serve import node_options, node_store
from worker_node.core.errors import BadRequest
from worker_node.models.catalog import CONVERTED_FORMS, Catalog, Quantization
from worker_node.models.disk import in_gigabytes

if TYPE_CHECKING:
    from worker_node.cli.node_client import NodeClient
    from worker_node.models.pull import Report

_EXAMPLES = """examples:
  npu-node pull smollm2                                   a model of the catalog (npu-node list --all)
  npu-node pull OpenVINO/Qwen3-8B-int4-cw-ov              a hub repository; @REVISION selects another than main
  npu-node pull hf.co/Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0  a GGUF file of one, by quantization
  npu-node pull ./model.gguf --name mine                  local files, copied
"""
_VERDICTS = {True: "suitable", False: "not suitable", None: "not known"}


def add_pull(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "pull",
        help="download, verify and convert models",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[node_options()],
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to pull; see the examples")
    parser.add_argument("--check", action="store_true", help="only report what it needs and whether it suits an NPU")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--embedded", action="store_true", help="the models that every node starts with")
    parser.add_argument("--name", help="how the model is to be called (default: as its source)")
    parser.add_argument(
        "--quantization",
        choices=[form.value for form in CONVERTED_FORMS],
        help="how to store the weights of GGUF models",
    )
    parser.add_argument(
        "--for",
        dest="device",
        choices=("npu", "cpu"),
        help="store the weights of GGUF models in the form that suits this device",
    )
    parser.add_argument("--model-store", type=Path, help="directory of the models")
    parser.set_defaults(run=_pull)


def _pull(args: argparse.Namespace) -> int:
    """Pull each model in turn; installed ones are not fetched again."""
    from worker_node.cli.node_client import on_node

    names = [entry.id for entry in Catalog.load().entries if args.embedded and entry.embedded] + args.names
    if not names:
        args.parser.error("name at least one model, or give --embedded")
    if args.name is not None and len(names) > 1:
        args.parser.error("--name is for one model")
    graphs = [_graph(name, args.name) for name in names]
    if args.quantization and args.device:
        args.parser.error("--for chooses the quantization: give one of the two")
    if args.check or args.embedded or args.name or args.quantization or args.device:
        failed = _pull_to_store(args, names)
    else:
        failed = on_node(
            args, lambda node: _pull_by_node(args, node, names), lambda: _pull_to_store(args, names), changes=True
        )
    print("".join(graphs), end="")
    return failed


def _graph(name: str, model_id: str | None) -> str:
    """What `graph.pbtxt` in a directory of OpenVINO Model Server is in node.toml. Raises ConfigurationError."""
    from worker_node.models.sources import LocalReference, foreign_reference
    from worker_node.settings.graph import GRAPH_FILE, read_graph

    reference = foreign_reference(name)
    if not isinstance(reference, LocalReference):
        return ""
    found, ignored = read_graph(reference.path)
    if "path" in found:
        raise BadRequest(
            f"{reference.path / GRAPH_FILE} says that the model is in {found['path']}: pull that directory, or serve "
            f'it where it is: path = "{found["path"]}" in [[models]]'
        )
    keys = {"name": model_id or reference.model_id} | found
    lines = [f"# {reference.path / GRAPH_FILE}", "[[models]]", *(f"{key} = {_toml(keys[key])}" for key in keys)]
    lines += [f"# without a counterpart here: {', '.join(ignored)}"] if ignored else []
    return "\n".join(["", *lines, ""]) if found or ignored else ""


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_toml(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _pull_by_node(args: argparse.Namespace, node: NodeClient, names: list[str]) -> int:
    from worker_node.cli.node_client import NodeCallFailed
    from worker_node.models.sources import is_local

    print(f"pulling into the node at {node.url}", file=sys.stderr)
    for name in names:
        # The node knows its own directories, not the one that this command was started in.
        local = "://" not in name and (name.startswith(("./", "../", "~")) or name.endswith(".gguf"))
        source = str(Path(name).expanduser().resolve()) if local else name
        try:
            with progress_display(name) as progress:
                node.pull(source, progress)
        except NodeCallFailed as error:
            if error.http_status != 400 or not is_local(name):
                raise
            # Requests may name few local files; the user of this command may read more.
            if failed := _pull_to_store(args, [name]):
                return failed
            continue
        print(f"{name}: ready at {node.url}; requests must name it, in the field model", flush=True)
    return 0


def _pull_to_store(args: argparse.Namespace, names: list[str]) -> int:
    store = node_store(args)
    if not args.check:
        print(f"pulling into the store {store.root}", file=sys.stderr)
    form = Quantization(args.quantization) if args.quantization else None
    specs = [store.pull_spec(name, model_id=args.name, quantization=form, device=args.device) for name in names]
    if args.check:
        from worker_node.models.pull import check

        reports = [check(spec, store.root) for spec in specs]
        if args.json:
            print_json([asdict(found) for found in reports])
        else:
            print("\n\n".join(map(_report_text, reports)))
        return 1 if any(found.problems for found in reports) else 0
    for spec in {spec.model_id: spec for spec in specs}.values():
        with progress_display(spec.model_id) as progress:
            model = store.pull(spec, progress)
        print(f"{model.id}: ready, {model.quantization}, {model.size / 1e6:.0f} MB in {model.path}", flush=True)
        if model.kind == "generation" and model.id != TOY_MODEL:
            print(f"requests must name it, in the field model: npu-node run {model.id}")
    if args.embedded:
        print(TOY_NOTE)
    return 0


def _report_text(found: Report) -> str:
    largest = sorted(found.files.items(), key=lambda item: -item[1])
    lines = [
        ("model", found.model_id),
        ("source", f"{found.source} ({found.format})"),
        ("licence", found.licence),
        ("files", f"{len(found.files)}, {in_gigabytes(sum(found.files.values()))}"),
        *(("", f"{in_gigabytes(size):>10}  {name}") for name, size in largest[:8]),
        ("disk", f"needs {in_gigabytes(found.disk_needed)}, {in_gigabytes(found.disk_available)} free"),
        (
            "memory",
            f"up to {in_gigabytes(found.memory_to_convert)} to convert, about {in_gigabytes(found.memory_to_run)} to "
            f"run; {in_gigabytes(found.memory_available)} available",
        ),
        ("context", "unknown" if found.context is None else f"{found.context} tokens"),
        ("NPU", f"{_VERDICTS[found.npu.suitable]}: {'; '.join(found.npu.reasons)}"),
        *(("problem", problem) for problem in found.problems),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in lines)
