"""`npu-node pull`: install models from the catalog, a hub, a URL or local files.

The running node does it (NPU_NODE_URL); where none runs, or an option needs it, they go into this user's store.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from worker_node.commands.progress import follow_pull, progress_display, progress_displays
from worker_node.devices.memory import available_memory
from worker_node.models.catalog import CONVERTED_FORMS, Catalog, Quantization
from worker_node.models.progress import Progress
from worker_node.models.store import ModelStore

if TYPE_CHECKING:
    from worker_node.commands.node_client import NodeClient

# The sum of what each of both is checked for (`conversion_needs`); measured was 1.1 GB.
_MEMORY_FOR_BOTH = 23 * 10**8

_EXAMPLES = """examples:
  npu-node pull smollm2                                   a model of the catalog (npu-node list --all)
  npu-node pull OpenVINO/Qwen3-8B-int4-cw-ov              a hub repository; @REVISION selects another than main
  npu-node pull hf.co/Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0  a GGUF file of one, by quantization
  npu-node pull https://example.com/model.gguf#sha256=…   one file by URL
  npu-node pull ./model.gguf --name mine                  local files, copied
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
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
        help="how to store the weights of GGUF models, and of encoders (f32, int8_sym)",
    )
    parser.add_argument("--insecure-no-hash", action="store_true", help="take the file of a URL without its hash")
    parser.add_argument("--model-store", type=Path, help="directory of the models")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Pull each model in turn; what is installed already is not fetched again."""
    catalog = Catalog.load()
    names = [entry.id for entry in catalog.embedded() if args.embedded] + args.names
    if not names:
        args.parser.error("name at least one model, or give --embedded")
    if args.name is not None and len(names) > 1:
        args.parser.error("--name is for one model")
    if not (args.check or args.embedded or args.name or args.quantization or args.insecure_no_hash or args.model_store):
        from worker_node.commands.node_client import on_node

        return on_node(lambda node: _pull_by_node(node, args.names), lambda: _pull_to_store(args, names, catalog))
    return _pull_to_store(args, names, catalog)


def _pull_by_node(node: NodeClient, names: list[str]) -> int:
    for name in names:
        # The node knows its own directories, not the one that this command was started in.
        local = "://" not in name and (name.startswith(("./", "../", "~")) or name.endswith(".gguf"))
        source = str(Path(name).expanduser().resolve()) if local else name
        with progress_display(name) as progress:
            follow_pull(node, source, progress)
        print(f"{name}: ready at {node.url}", flush=True)
    return 0


def _pull_to_store(args: argparse.Namespace, names: list[str], catalog: Catalog) -> int:
    store = ModelStore(args.model_store, catalog)
    wishes = [
        store.wish(
            name,
            model_id=args.name,
            quantization=Quantization(args.quantization) if args.quantization else None,
            insecure_no_hash=args.insecure_no_hash,
        )
        for name in names
    ]
    if args.check:
        from worker_node.commands.check import report

        return report(wishes, store.root, as_json=args.json)
    if args.embedded and args.quantization is None:
        together = [entry.id for entry in catalog.embedded() if not store.is_installed(store.wish(entry.id))]
        memory = available_memory()
        if len(together) > 1 and (memory is None or memory >= _MEMORY_FOR_BOTH):
            _pull_at_once(store, together)
    for wish in {wish.model_id: wish for wish in wishes}.values():
        with progress_display(wish.model_id) as progress:
            model = store.pull(wish, progress)
        print(f"{model.id}: ready, {model.size / 1e6:.0f} MB in {model.path}", flush=True)
    return 0


def _pull_at_once(store: ModelStore, names: list[str]) -> None:
    """Pull models of the catalog, each in a process of its own.

    Raises the NodeError of the first that fails, and ends the others.
    """
    from worker_node.models.pull import pull

    async def pull_all(shown: Sequence[Progress]) -> None:
        # A group cancels each task once: a second time would not let it wait for the end of its process.
        async with asyncio.TaskGroup() as group:
            for name, progress in zip(names, shown, strict=True):
                group.create_task(pull(store.root, name, progress))

    problem: Exception
    try:
        with progress_displays(names) as shown:
            asyncio.run(pull_all(shown))
        return
    except ExceptionGroup as failed:
        problem = failed.exceptions[0]
    raise problem
