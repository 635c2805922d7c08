"""`npu-node compile`: compile a model for this machine's NPU ahead of time (docs/npu.md)."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from worker_node.cli.serve import add_config

if TYPE_CHECKING:
    from worker_node.models.directory import InstalledModel
    from worker_node.settings import ModelSettings, NodeSettings


_FACTS = ("model_sha256", "device", "architecture", "driver", "compiler", "openvino", "genai")


def add_compile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile a model for the NPU ahead of time",
        description="Compile a model for this machine's NPU, as a node with the same settings would when it loads it. "
        "A node loads the result when the model's `blobs` names the directory.",
    )
    parser.add_argument("model", metavar="MODEL", help="the name of an installed model, or a directory with one")
    parser.add_argument("--device", choices=("NPU",), default="NPU", help="what to compile for")
    parser.add_argument(
        "--platform",
        metavar="NPU",
        help="compile for another machine's NPU, not proven: 3720 (Meteor and Arrow Lake), 4000 (Lunar Lake), 5010 "
        "(Panther Lake) …; needs an OpenVINO with the NPU compiler, as on Windows",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory for the blobs")
    add_config(parser)
    parser.add_argument("--model-store", type=Path, help="directory of the models")
    parser.add_argument(
        "--profile", choices=("node", "bounded"), default="node", help="bounded: with the lengths of that profile"
    )
    parser.add_argument("--json", action="store_true", help="the record as JSON")
    parser.set_defaults(run=_compile)


def _compile(args: argparse.Namespace) -> int:
    from worker_node.cli.output import print_json
    from worker_node.cli.serve import settings_source
    from worker_node.serving.compiling import compile_ahead

    logging.basicConfig(level="WARNING", format="%(message)s")
    # What it says of an engine that cannot be loaded is the error of this command.
    logging.getLogger("worker_node.engines.supervisor").setLevel("CRITICAL")
    settings = settings_source(args).read()
    installed, wanted = _model(args, settings)
    record = asyncio.run(compile_ahead(installed, wanted, settings, args.out, args.platform))
    sizes = {name: (args.out / name).stat().st_size for name in record.files}
    facts = {name: record.origin[name] for name in _FACTS}
    if args.json:
        settings_in = {name: value for name, value in record.origin.items() if name not in facts}
        files = {name: {"size": sizes[name], "sha256": digest} for name, digest in record.files.items()}
        origin = {"model": record.model, **facts, "settings": settings_in}
        print_json({"version": record.version, "proven": record.proven, "origin": origin, "files": files})
        return 0
    for name, value in facts.items():
        if value is not None and name != "model_sha256":
            print(f"{name:<14}{value}")
    for name, size in sizes.items():
        print(f"{size / 1e6:>10.1f} MB  {name}")
    where = args.out.absolute()
    use = f"OV_GENAI_NPU_BLOBS={where}" if args.profile == "bounded" else f'blobs = "{where.as_posix()}" for the model'
    if not record.proven:
        print(f"NOT PROVEN: no NPU {args.platform} has run it; a node there asks the canary whenever it loads it")
    print(f"{record.model}: compiled into {args.out}; to use it, set {use}")
    return 0


def _model(args: argparse.Namespace, settings: NodeSettings) -> tuple[InstalledModel, ModelSettings]:
    """The model, and the settings that it is compiled with. Raises ConfigurationError."""
    from worker_node.bounded.settings import bounded_model
    from worker_node.models.store import ModelStore
    from worker_node.serving.build import installed_model
    from worker_node.settings import ModelSettings

    name = str(args.model)
    configured = [model for model in settings.models if model.name == name]
    path = Path(name) if "/" in name or name in {".", ".."} else None
    wanted = configured[0] if configured else ModelSettings(name=Path(name).resolve().name if path else name, path=path)
    installed = installed_model(wanted, ModelStore(settings.model_store), settings)
    return installed, bounded_model(installed.id) if args.profile == "bounded" else wanted
