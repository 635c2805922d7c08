"""`npu-node serve`: run a node."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_node.errors import ConfigurationError

if TYPE_CHECKING:
    from worker_node.settings import NodeSettings

_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags; each flag overrides the environment and the file."""
    parser = commands.add_parser("serve", help="run a node", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file with settings (see config/node.toml)")
    parser.add_argument("--host", help="address to bind; another than loopback needs an API key")
    parser.add_argument("--port", type=int, help="port to bind; 0 takes a free one")
    parser.add_argument("--model-store", type=Path, help="directory of the models")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; return the exit status."""
    import uvloop

    from worker_node.server import run as run_node

    logging.basicConfig(level=args.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    settings = load_settings(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_node(settings, on_listening=_announce))
    return 0


def load_settings(args: argparse.Namespace) -> NodeSettings:
    """Return the settings from flags, environment and file. Raises ConfigurationError, each problem on its line."""
    from pydantic import ValidationError

    from worker_node.settings import NodeSettings

    flags: dict[str, Any] = {
        name: value for name in ("host", "port", "model_store") if (value := getattr(args, name)) is not None
    }
    try:
        return NodeSettings.load(args.config, **flags)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_input=False, include_url=False, include_context=False)
        ]
        raise ConfigurationError("the settings are wrong:\n  " + "\n  ".join(problems)) from None
    except (OSError, ValueError) as error:
        source = args.config or "the environment"
        raise ConfigurationError(f"the settings in {source} cannot be read: {error}") from None


def _announce(url: str) -> None:
    # On standard output and alone, so that a script that started the node on port 0 can read where it is.
    print(f"listening on {url}", flush=True)
