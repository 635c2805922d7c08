"""`npu-node serve`: run a node; and the settings of every command that needs them."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_node.cli.output import TOY_MODEL, TOY_NOTE, USEFUL_MODEL, log_to_stderr
from worker_node.core.errors import ConfigurationError

if TYPE_CHECKING:
    from worker_node.bounded.settings import BoundedSettings
    from worker_node.models.directory import InstalledModel
    from worker_node.models.store import ModelStore
    from worker_node.node import Node
    from worker_node.settings import SettingsSource

log = logging.getLogger(__name__)

_LOG_LEVELS = ("debug", "info", "warning", "error")


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags; each flag overrides the environment and the file."""
    parser = commands.add_parser("serve", help="run a node", description="Run a node.")
    add_config(parser)
    parser.add_argument("--host", help="address to bind; another than loopback needs an API key")
    parser.add_argument("--port", type=int, help="port to bind; 0 takes a free one")
    parser.add_argument("--model-store", type=Path, help="directory of the models")
    parser.add_argument(
        "--profile",
        choices=("node", "bounded", "npu-proxy"),
        default="node",
        help="bounded: docs/bounded-jobs.md; npu-proxy: docs/coming-from.md",
    )
    parser.add_argument("--faults", type=Path, help="TOML file of faults on demand: docs/certify.md")
    parser.add_argument("--log-level", choices=_LOG_LEVELS, help="default: NPU_NODE_LOG_LEVEL, else info")
    parser.set_defaults(run=_serve)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        help="TOML file with settings; default: NPU_NODE_CONFIG, else ~/.config/npu-node/node.toml, else "
        "/etc/npu-node/node.toml",
    )


def node_options() -> argparse.ArgumentParser:
    """The parent of every command that calls a running node."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("a node that serves https")
    group.add_argument("--ca-file", metavar="FILE", help="the authority of its certificate (NPU_NODE_CA_FILE)")
    group.add_argument("--client-cert", metavar="FILE", help="the certificate to show it (NPU_NODE_CLIENT_CERT)")
    group.add_argument("--client-key", metavar="FILE", help="its key; default: in that file (NPU_NODE_CLIENT_KEY)")
    return parent


def _serve(args: argparse.Namespace) -> int:
    from worker_node.settings.npu_proxy import notices

    level = args.log_level
    for name in ("NPU_NODE_LOG_LEVEL", "NPU_PROXY_LOG_LEVEL"):
        value = os.environ.get(name, "")
        if not level and value and value.lower() not in _LOG_LEVELS:
            raise ConfigurationError(f"{name} must be one of {', '.join(_LOG_LEVELS)}, got {value[:40]!r}")
        level = level or value
    log_to_stderr((level or "info").upper())
    bounded = args.profile == "bounded"
    # First, so that a mistake in them is reported before the slow imports.
    if bounded:
        bounded_settings = load_bounded_settings(args)
    else:
        source = settings_source(args)
        settings = source.read()
        log.info("settings: %s", source.config or "no file: defaults, NPU_NODE_* and flags")
        for notice in notices(os.environ):
            log.warning("%s", notice)
    # Imports make some hundred thousand objects and no garbage: the collector would look through them again and again,
    # now and while the node serves.
    gc.disable()
    from worker_node.core.operating_system import event_loop_factory

    if bounded:
        from worker_node.bounded.profile import run_sidecar

        served = run_sidecar(bounded_settings, on_listening=_announce)
    else:
        from worker_node.server import run

        served = run(settings, source=source, on_listening=announce_and_welcome)
    gc.freeze()
    gc.enable()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(served)
    return 0


def settings_source(args: argparse.Namespace) -> SettingsSource:
    from worker_node.settings import SettingsSource
    from worker_node.settings.reading import find_file

    flags = _flags(args, "host", "port", "model_store", "faults")
    npu_proxy = getattr(args, "profile", None) == "npu-proxy"
    return SettingsSource(find_file(getattr(args, "config", None)), flags, npu_proxy)


def node_store(args: argparse.Namespace) -> ModelStore:
    """The store of the node that `serve` would run: of the flag, the variable, the file, or the machine's unit."""
    from worker_node.models.store import STORE_VARIABLE, ModelStore
    from worker_node.settings import reading

    source = settings_source(args)
    given = getattr(args, "model_store", None)
    if given or os.environ.get(STORE_VARIABLE) or source.config is None:
        return ModelStore(given)
    settings = source.read_without_keys()
    unit = source.config == reading.SYSTEM_FILE and "model_store" not in settings.model_fields_set
    return ModelStore(
        reading.SYSTEM_STORE if unit and os.access(reading.SYSTEM_STORE, os.R_OK) else settings.model_store
    )


def load_bounded_settings(args: argparse.Namespace) -> BoundedSettings:
    """Return the settings of the bounded profile from flags and environment; errors as of `settings_source`."""
    from pydantic import ValidationError

    from worker_node.bounded.settings import BoundedSettings
    from worker_node.settings import InvalidSettings
    from worker_node.settings.reading import check_variables

    if getattr(args, "config", None) or getattr(args, "model_store", None):
        raise ConfigurationError("the bounded profile takes neither --config nor --model-store; it has OV_GENAI_NPU_*")
    if problems := check_variables(os.environ):
        raise InvalidSettings(problems)
    try:
        settings = BoundedSettings(**_flags(args, "host", "port"))
        settings.node_settings()  # NPU_NODE_* counts too, and its mistakes are reported in the same way
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_input=False, include_url=False, include_context=False)
        ]
        raise ConfigurationError("the settings are wrong:\n  " + "\n  ".join(wrong)) from None
    except ValueError as error:
        raise ConfigurationError(f"the settings in the environment cannot be read: {error}") from None
    return settings


def _flags(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _announce(url: str, _node: Node) -> None:
    # On standard output and alone, so that a script that started the node on port 0 can read where it is.
    print(f"listening on {url}", flush=True)


def announce_and_welcome(url: str, node: Node) -> None:
    """Print the URL; then `welcome` on a terminal, two lines in a log."""
    _announce(url, node)
    if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
        print(welcome(reachable(url), node), file=sys.stderr, flush=True)
        return
    log.info("devices: %s", devices(node))
    log.info("next: open %s/play; %s", reachable(url), "; ".join(_commands(reachable(url), node)))


def welcome(url: str, node: Node) -> str:
    """Addresses, devices, the models with their state, and what to do next."""
    key = " -H 'Authorization: Bearer KEY'" if node.settings.api_keys else ""
    manager = node.manager
    rows = []
    for model in manager.models:
        preferred = model.placements[0]
        emulated = ", emulated" if preferred.emulated else ""
        rows.append((model.id, f"{model.state().value} on {preferred.device}{emulated}"))
    rows += [(model.name, f"failed: {model.reason}") for model in manager.failed]
    width = max((len(name) for name, _ in rows), default=0)
    models = [f"{name.ljust(width)}  {state}" for name, state in rows]
    if on_demand := ", ".join(model.id for model in _only_installed(node)):
        models.append(f"loaded when a request names them: {on_demand}")
    return "\n".join(
        [
            f"  dashboard  {url}/dashboard   (playground: {url}/play)",
            f"  API        {url}/docs",
            f"  OpenAI     {url}/v1",
            f"  Ollama     {url}",
            f"  devices    {devices(node)}",
            "  models     " + "\n             ".join(models or ["none: a request for an installed model loads it"]),
            "what next, in another terminal:",
            f"""  curl {url}/embeddings{key} -d '{{"texts": ["hello"]}}'""",
            *(f"  {command}" for command in _commands(url, node)),
        ]
    )


def devices(node: Node) -> str:
    """The devices that were found; where models expect an NPU and there is none, what runs in its place."""
    found = node.probe
    if found.error is not None:
        return f"not known, {found.error}"
    names = ", ".join(device.name for device in found.devices)
    if node.npu.emulated:
        return f"{names}; the NPU is emulated on the CPU"
    places = [model.placements for model in node.settings.models]
    if found.find("NPU") or not any(wanted is None or "NPU" in [place.device for place in wanted] for wanted in places):
        return names
    return f"{names}; no NPU found, models run without it (see npu-node doctor)"


def _only_installed(node: Node) -> list[InstalledModel]:
    """The models of the store that the settings do not name, and that no request has asked for."""
    manager = node.manager
    known = {model.id for model in manager.models} | {model.name for model in manager.failed}
    return [model for model in manager.store.installed() if model.id not in known]


def _commands(url: str, node: Node) -> list[str]:
    """A chat with the first model that writes, and the way to a better one than the toy."""
    from worker_node.cli.node_client import DEFAULT_URL

    run = "npu-node run" if url == DEFAULT_URL else f"NPU_NODE_URL={url} npu-node run"
    writers = [model.id for model in node.manager.models if model.installed.kind == "generation"]
    others = [model.id for model in _only_installed(node) if model.kind == "generation"]
    if not writers:
        return [f"{run} {next(iter(others), USEFUL_MODEL)}"]
    if writers != [TOY_MODEL]:
        return [f"{run} {writers[0]}"]
    if others:
        return [f"{run} {others[0]}", f"requests that name no model are answered by the toy {TOY_MODEL}"]
    return [f"{run} {TOY_MODEL}", TOY_NOTE]


def reachable(url: str) -> str:
    """An address that can be called: a node on all of them is called by loopback here."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
