"""`npu-gateway`: `serve` the fleet under one address, and make the `keys` of its teams."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import selectors
import signal
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from backend_client.client import InferenceClient
from backend_client.errors import INSTALL_EXTRA, ConfigurationError
from backend_client.gateway.keys import KeyEntry, KeyFile, KeyStore, Registry
from backend_client.gateway.settings import GatewaySettings
from backend_client.options import NO_FAILOVER, FailoverOptions
from backend_client.settings import ClientSettings

# Of the 1,024 that a node takes; probes have some of their own.
_CONNECTIONS_PER_NODE = 1000
_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# A pipe that takes a write has room for so many bytes.
_LOG_CHUNK = 4096
# What the extra `gateway` installs.
_PACKAGES = ("limits", "opentelemetry", "prometheus_client", "redis")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npu-gateway", description="One address for a fleet of NPU nodes. Settings: NPU_GATEWAY_*, NPU_CLIENT_*."
    )
    parser.add_argument("--version", action="version", version=f"npu-gateway {version('npu-node')}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the fleet under one address")
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (8090)")
    serve.add_argument("--node", dest="nodes", action="append", metavar="URL", help="a node; may be given again")
    serve.set_defaults(run=_serve)
    actions = _add_actions(commands, "keys", "make, list and end the keys of teams", _change_keys)
    add = _add_action(actions, "add", "make a key for a team; it is shown once", "team")
    add.add_argument(
        "--model", dest="models", action="append", default=[], help="only these models; may be given again"
    )
    add.add_argument("--no-cloud", action="store_true", help="its requests never leave the nodes")
    for name in ("requests", "tokens"):
        what = f"{name} a minute; 0 (default) is no limit"
        add.add_argument(f"--{name}", type=int, default=0, metavar="N", help=what)
    add.add_argument("--spend-cap", type=_amount, metavar="AMOUNT", help="what the cloud may cost in a month (UTC)")
    add.add_argument("--admin", action="store_true", help="it sees the usage of all teams")
    add.add_argument(
        "--failover",
        type=_failover,
        default=NO_FAILOVER,
        metavar="OPTIONS",
        help="when answers are given up: first_token_s=5, stream_recovery=restart",
    )
    _add_action(actions, "list", "all keys, without the keys themselves")
    _add_action(actions, "revoke", "end a key at once", "prefix")
    rotate = _add_action(actions, "rotate", "replace a key by a new one", "prefix")
    rotate.add_argument("--overlap", type=float, default=0.0, metavar="S", help="the old one holds so long (0)")

    what = "enrol nodes that announce themselves, list, drain and remove them"
    actions = _add_actions(commands, "nodes", what, _change_nodes)
    _add_action(actions, "list", "all nodes, and where they are")
    enrol = _add_action(actions, "enrol", "make the key of a node; it is shown once", "name")
    enrol.add_argument("--port", type=int, default=8081, help="the only port it may announce (8081)")
    _add_action(actions, "drain", "send a node no more requests", "name")
    _add_action(actions, "resume", "let a drained node have requests again", "name")
    _add_action(actions, "remove", "end an enrolment", "name")
    return parser


def _add_actions(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    parser = commands.add_parser(name, help=what)
    parser.add_argument("--keys", type=Path, help="the file of keys and nodes (NPU_GATEWAY_KEYS)")
    parser.set_defaults(run=run)
    return parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)


def _add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str, *arguments: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=what)
    for argument in arguments:
        parser.add_argument(argument)
    return parser


def _amount(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"must be an amount such as 20 or 19.99, got {text[:40]!r}") from None


def _failover(text: str) -> FailoverOptions:
    try:
        return FailoverOptions.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 1 failed with a message, 2 wrong usage."""
    from backend_client.cli.main import reported  # noqa: PLC0415  (the commands of npu-client, for its errors alone)

    parser = build_parser()
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help()
        return 0
    return reported(lambda: _run_command(args), "npu-gateway")


def _run_command(args: argparse.Namespace) -> int:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the gateway needs more packages ({', '.join(missing)}): {INSTALL_EXTRA.format('gateway')}"
        )
    try:
        status: int = args.run(args)
    except sqlite3.Error as error:
        raise ConfigurationError(f"the file of the keys cannot be used: {error}") from None
    return status


class LogHandler(logging.Handler):
    """Writes log lines to a stream, and drops those that nobody reads: as `worker_node.cli.output` does.

    A reader that stops (Ctrl-S, a pager, a stuck collector) must not stop the server: its event loop would wait for
    the write. Making one raises OSError for a stream that cannot be asked whether it takes a write.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._file = stream.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._file, selectors.EVENT_WRITE)
        self._selector.select(0.0)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        lines = f"{self.format(record)}\n"
        if self._dropped:
            lines = f"{self._dropped} lines of the log are lost, since stderr took no more\n{lines}"
        try:
            written = self._write(lines.encode(errors="backslashreplace"))
        except OSError:  # a full disk, or a reader that has ended
            written = False
        self._dropped = 0 if written else self._dropped + 1

    def _write(self, text: bytes) -> bool:
        while text:
            # A reader that was only slow gets its time; one that stopped is not waited for again.
            if not self._selector.select(0.0 if self._dropped else 0.02):
                return False
            text = text[os.write(self._file, text[:_LOG_CHUNK]) :]
        return True


def _serve(args: argparse.Namespace) -> int:
    settings = GatewaySettings.load(host=args.host, port=args.port)
    values: dict[str, object] = {"nodes": args.nodes} if args.nodes else {}
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    with suppress(OSError):  # a file, which always takes a write, and streams of Windows cannot be asked
        handler = LogHandler(sys.stderr)
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, handlers=[handler])
    fleet = ClientSettings.load(None, **values)
    # A service has one client, a gateway the callers of all: each open stream takes a connection.
    defaults: dict[str, object] = {"connections_per_node": _CONNECTIONS_PER_NODE}
    if settings.allowed_networks:
        # Those that announce themselves, and not the default node of this machine.
        defaults["nodes"] = ()
    unset = {name: value for name, value in defaults.items() if name not in fleet.model_fields_set}
    asyncio.run(_run(settings, ClientSettings.with_values(fleet, unset)))
    return 0


async def _run(settings: GatewaySettings, fleet: ClientSettings) -> None:
    from aiohttp import web  # noqa: PLC0415  (as below: only `serve` needs it)

    from backend_client.gateway.app import make_app  # noqa: PLC0415

    runner = web.AppRunner(
        make_app(settings, InferenceClient.from_settings(fleet, registering=bool(settings.allowed_networks))),
        access_log=None,
        handler_cancellation=True,
    )
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        keys = "keys of teams" if settings.keys else "no keys, this machine only"
        print(
            f"npu-gateway listens on http://{host}:{port} ({keys}); nodes: {', '.join(fleet.nodes) or 'announced'}",
            flush=True,
        )
        await stop.wait()
    finally:
        await runner.cleanup()


def _path(args: argparse.Namespace) -> Path:
    path: Path | None = args.keys or GatewaySettings.load().keys
    if path is None:
        raise ConfigurationError("the file of the keys must be named: --keys FILE, or NPU_GATEWAY_KEYS")
    return path


def _change_keys(args: argparse.Namespace) -> int:
    with closing(KeyStore(_path(args))) as store:
        if args.action == "add":
            rights = {name: getattr(args, name) for name in ("requests", "tokens", "spend_cap", "admin", "failover")}
            print(store.add(args.team, args.models, cloud=not args.no_cloud, **rights))
        elif args.action == "rotate":
            print(store.rotate(args.prefix, args.overlap))
        elif args.action == "revoke":
            store.revoke(args.prefix)
        else:
            entries = store.entries
            if entries:
                print(_KEY_ROW.format("KEY", "TEAM", "CLOUD", "ENDS (UTC)", "LIMITS A MINUTE", "MODELS AND RIGHTS"))
            for entry in entries:
                print(_shown(entry))
    return 0


_KEY_ROW = "{:12}  {:24}  {:24}  {:16}  {:32}  {}"


def _shown(entry: KeyEntry) -> str:
    team = entry.team
    ends = "-" if entry.until is None else f"{datetime.fromtimestamp(entry.until, UTC):%Y-%m-%d %H:%M}"
    cloud = "cloud" if team.cloud else "no cloud"
    models = ", ".join(sorted(team.models)) or "all models"
    limits = f"{team.requests or '-'} requests, {team.tokens or '-'} tokens"
    if team.spend_cap is not None:
        cloud += f" up to {team.spend_cap} a month"
    rights = [models, *(["admin"] if team.admin else [])]
    rights += [f"{name}={value}" for name, value in team.failover.model_dump(exclude_unset=True).items()]
    return _KEY_ROW.format(entry.prefix, team.name, cloud, ends, limits, ", ".join(rights))


def _change_nodes(args: argparse.Namespace) -> int:
    with closing(KeyFile(_path(args))) as file:
        registry = Registry(file)
        if args.action == "enrol":
            print(registry.enrol(args.name, args.port))
        elif args.action == "remove":
            registry.remove(args.name)
        elif args.action in {"drain", "resume"}:
            registry.drain(args.name, drained=args.action == "drain")
        else:
            for node in registry.list():
                state = "drained" if node.drained else "live" if node.live else "silent"
                labels = ", ".join(f"{name}={value}" for name, value in node.labels.items())
                print(f"{node.name:24}  {state:8}  {node.url or '-':32}  {node.version or '-':12}  {labels}".rstrip())
    return 0
