"""Change the store: `pull`, `convert` and `rm`.

The node of NPU_NODE_URL pulls and removes; without one this process does in the store of --model-store or
NPU_NODE_MODEL_STORE; without these the local node does, or, where none runs or an option needs it, this process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_node.cli.output import TOY_MODEL, TOY_NOTE

if TYPE_CHECKING:
    from worker_node.cli.node_client import NodeClient
    from worker_node.models.pull import PullSpec, Report

_EXAMPLES = """examples:
  npu-node pull smollm2                                   a model of the catalog (npu-node list --all)
  npu-node pull OpenVINO/Qwen3-8B-int4-cw-ov              a hub repository; @REVISION selects another than main
  npu-node pull hf.co/Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0  a GGUF file of one, by quantization
  npu-node pull ./model.gguf --name mine                  local files, copied
"""
_VERDICTS = {True: "suitable", False: "not suitable", None: "not known"}


def add_pull(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`npu-node pull NAME…`."""
    from worker_node.models.catalog import CONVERTED_FORMS

    parser = commands.add_parser(
        "pull",
        help="download, verify and convert models",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    parser.add_argument("--model-store", type=Path, help="directory of the models")
    parser.set_defaults(run=_pull)


def add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`npu-node convert SRC`."""
    from worker_node.models.catalog import CONVERTED_FORMS
    from worker_node.registry import tasks

    parser = commands.add_parser("convert", help="convert a GGUF file, or a directory of safetensors or OpenVINO files")
    parser.add_argument("source", metavar="SRC", type=Path, help="the file or directory; it is left as it is")
    parser.add_argument("--name", help="how the model is to be called (default: as the file or directory)")
    parser.add_argument("--kind", choices=list(tasks()), help="refuse files of the other kind")
    parser.add_argument(
        "--quantization",
        choices=[form.value for form in CONVERTED_FORMS],
        help="how to store the weights of a GGUF file",
    )
    parser.set_defaults(run=_convert)


def add_rm(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`npu-node rm MODEL…`."""
    parser = commands.add_parser(
        "rm", help="remove models", description="Remove models, from the running node or the store."
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="id, alias or source")
    parser.add_argument("--force", action="store_true", help="end the requests that a model has in flight")
    parser.add_argument("--model-store", type=Path, help="directory of the models")
    parser.set_defaults(run=_rm)


def _pull(args: argparse.Namespace) -> int:
    """Pull each model in turn; installed ones are not fetched again."""
    from worker_node.cli.node_client import on_node
    from worker_node.models.catalog import Catalog

    names = [entry.id for entry in Catalog.load().embedded() if args.embedded] + args.names
    if not names:
        args.parser.error("name at least one model, or give --embedded")
    if args.name is not None and len(names) > 1:
        args.parser.error("--name is for one model")
    graphs = [_graph(name, args.name) for name in names]
    if args.check or args.embedded or args.name or args.quantization:
        failed = _pull_to_store(args, names)
    else:
        failed = on_node(
            args, lambda node: _pull_by_node(args, node, names), lambda: _pull_to_store(args, names), changes=True
        )
    print("".join(graphs), end="")
    return failed


def _graph(name: str, model_id: str | None) -> str:
    """What `graph.pbtxt` in a directory of OpenVINO Model Server is in node.toml. Raises ConfigurationError."""
    from worker_node.core.errors import BadRequest
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
    from worker_node.cli.output import progress_display
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
    from worker_node.cli.output import progress_display
    from worker_node.cli.serve import node_store
    from worker_node.models.catalog import Quantization

    store = node_store(args)
    if not args.check:
        print(f"pulling into the store {store.root}", file=sys.stderr)
    specs = [
        store.pull_spec(
            name,
            model_id=args.name,
            quantization=Quantization(args.quantization) if args.quantization else None,
        )
        for name in names
    ]
    if args.check:
        return _report(specs, store.root, as_json=args.json)
    for spec in {spec.model_id: spec for spec in specs}.values():
        with progress_display(spec.model_id) as progress:
            model = store.pull(spec, progress)
        print(f"{model.id}: ready, {model.size / 1e6:.0f} MB in {model.path}", flush=True)
        if model.kind == "generation" and model.id != TOY_MODEL:
            print(f"requests must name it, in the field model: npu-node run {model.id}")
    if args.embedded:
        print(TOY_NOTE)
    return 0


def _report(specs: Sequence[PullSpec], store: Path, *, as_json: bool) -> int:
    """Print what each pull needs; 1 if one would not fit on this machine."""
    from dataclasses import asdict

    from worker_node.cli.output import print_json
    from worker_node.models.pull import check

    reports = [check(spec, store) for spec in specs]
    if as_json:
        print_json([asdict(found) for found in reports])
    else:
        print("\n\n".join(map(_report_text, reports)))
    return 1 if any(found.problems for found in reports) else 0


def _report_text(found: Report) -> str:
    from worker_node.models.disk import in_gigabytes

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


def _convert(args: argparse.Namespace) -> int:
    from worker_node.cli.output import progress_display
    from worker_node.cli.serve import node_store
    from worker_node.models.catalog import Quantization

    with progress_display(str(args.source)) as progress:
        model = node_store(args).convert(
            args.source,
            args.name,
            progress,
            kind=args.kind,
            quantization=Quantization(args.quantization) if args.quantization else None,
        )
    print(f"{model.id}: {model.kind}, ready, {model.size / 1e6:.0f} MB in {model.path}")
    return 0


def _rm(args: argparse.Namespace) -> int:
    """Remove each model in turn; the first that fails ends it."""
    from worker_node.cli.node_client import on_node

    return on_node(args, lambda node: _remove_from_node(node, args), lambda: _remove_from_store(args), changes=True)


def _remove_from_node(node: NodeClient, args: argparse.Namespace) -> int:
    from worker_node.cli.node_client import NodeCallFailed, model_path

    print(f"removing from the node at {node.url}", file=sys.stderr)
    for name in args.models:
        try:
            node.call("DELETE", model_path(name) + ("?force=true" if args.force else ""))
        except NodeCallFailed as error:
            if error.http_status != HTTPStatus.CONFLICT:
                raise
            raise NodeCallFailed(
                f"{name} has requests in flight; wait for their end, or add --force", error.http_status
            ) from None
        print(f"{name}: removed")
    return 0


def _remove_from_store(args: argparse.Namespace) -> int:
    from worker_node.cli.serve import node_store

    store = node_store(args)
    print(f"removing from the store {store.root}", file=sys.stderr)
    for name in args.models:
        store.remove(name)
        print(f"{name}: removed")
    return 0
