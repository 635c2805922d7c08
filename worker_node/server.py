"""The life of a node: load, listen, serve, drain, stop; the service manager hears of it (systemd's sd_notify)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from worker_node.announce import announced
from worker_node.app import make_app
from worker_node.core.errors import ConfigurationError, NodeError
from worker_node.core.operating_system import allow_files, on_reload, own_address, send_datagram, stop_signals
from worker_node.core.types import Device
from worker_node.devices.npu import npu_source
from worker_node.devices.probe import probe
from worker_node.devices.recovery import listening, uevents
from worker_node.http.connection import ConnectionLimits, Connections
from worker_node.http.health import node_status
from worker_node.http.replies import Renderer, error_response
from worker_node.http.tls import ServerTls
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import FailedModel, ServedModel
from worker_node.models.store import ModelStore
from worker_node.node import Node, NodeState, Reloader, follow_changes
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import open_tracing
from worker_node.registry import tasks
from worker_node.serving.build import (
    HOST,
    Machine,
    build_on_demand,
    configured_model,
    configured_models,
    memory_budgets,
)
from worker_node.serving.demanded_faults import check_faults
from worker_node.serving.run import Services, TaskParts
from worker_node.serving.task import served_task
from worker_node.settings import NodeSettings
from worker_node.settings.reading import SettingsSource

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_BACKLOG = 1024
# Engines, models, logs, connections beyond the limit.
_OTHER_FILES = 1024
_SPARE_CONNECTIONS = 64
_REMEDIES = {
    errno.EADDRINUSE: "is another node running? choose another port",
    errno.EADDRNOTAVAIL: "host must be an address of this machine",
    errno.EACCES: "ports below 1024 need root, or CAP_NET_BIND_SERVICE: choose a higher port",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """What a node serves: its models, built but not started; its routes; the form of an error that no route made.

    `starts_parts`: whether what its tasks need beside engines, as processes that compile schemas, is started with the
    node, and not only by the first request.
    """

    models: Callable[[Machine], Sequence[ServedModel | FailedModel]] = configured_models
    make_app: Callable[[Node], web.Application] = make_app
    render: Renderer = error_response
    starts_parts: bool = True


FULL = Profile()


async def run(
    settings: NodeSettings,
    profile: Profile = FULL,
    *,
    source: SettingsSource | None = None,
    on_listening: Callable[[str, Node], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return; within 30 s of the signal everything has ended.

    `on_listening` is called with the node's URL and the node. `source` is where the settings are read again, on SIGHUP
    and when its file changes. Raises ConfigurationError when it cannot start.
    """
    systemd = ServiceManager.from_environment()

    stop, hangup = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    with stop_signals(loop, stop.set):
        # Its default action is to end the process.
        on_reload(loop, log.warning, "SIGHUP: this node's settings are read at start; restart it")
        async with AsyncExitStack() as stack:
            node, url = await stack.enter_async_context(running_node(settings, profile, source))
            if node.reloader is not None and source is not None:
                on_reload(loop, hangup.set)
                _background(stack, "follow the settings", follow_changes(source.config, node.reloader, hangup))
            on_listening(url, node)

            def status() -> str:
                models = node.manager.models
                usable = sum(model.serving() is not None for model in models)
                running = node.state.running
                return f"{node_status(node)}; {usable} of {len(models)} models serve, {running} requests in flight"

            async with systemd.attended(status):
                await stop.wait()
                systemd.stopping()
                await _drain(node)


def connections_allowed(wanted: int) -> tuple[int, int]:
    """How many connections may have a request, and how many more may be open, with the files that we may open.

    Without a free file descriptor, no connection could even be refused, and nothing could be read or loaded.
    """
    needed = wanted + _OTHER_FILES
    if (allowed := allow_files(needed)) >= needed:
        return wanted, _SPARE_CONNECTIONS
    free = allowed - min(_OTHER_FILES, allowed // 2)
    spare = min(_SPARE_CONNECTIONS, free // 2)
    most = min(wanted, free - spare)
    log.warning(
        "this process may open %d files, and max_connections = %d needs %d: it is lowered to %d; raise the limit "
        "(ulimit -n, LimitNOFILE)",
        allowed,
        wanted,
        needed,
        most,
    )
    return most, spare


def _background(stack: AsyncExitStack, name: str, work: Coroutine[Any, Any, None]) -> None:
    stack.callback(asyncio.create_task(work, name=name).cancel)


@asynccontextmanager
async def running_node(
    settings: NodeSettings, profile: Profile = FULL, source: SettingsSource | None = None
) -> AsyncIterator[tuple[Node, str]]:
    """A node that listens while the block runs; its engines load meanwhile. Yields it and its URL."""
    async with AsyncExitStack() as stack:
        socks: list[socket.socket] = []
        for port in (settings.port, settings.ollama_port):
            if port is not None:
                socks.append(_bind(settings.host, port))
                stack.callback(socks[-1].close)

        node = await stack.enter_async_context(hosted_node(settings, profile, source))
        telemetry = node.telemetry
        _background(stack, "event loop lag", telemetry.watch_event_loop())

        app = profile.make_app(node)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_TIMEOUT_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)

        tls = None
        if settings.tls_cert is not None:
            tls = ServerTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
            _background(stack, "TLS files", tls.follow())
        elif settings.tls_key is not None or settings.tls_client_ca is not None:
            raise ConfigurationError("tls_key and tls_client_ca need tls_cert")

        def note(error: NodeError) -> None:
            telemetry.http_requests.labels("-", str(error.status)).inc()
            telemetry.failed("-", error)

        assert runner.server is not None  # noqa: S101  (setup() made it)
        most, spare = connections_allowed(settings.max_connections)
        limits = ConnectionLimits(settings.header_timeout_s, settings.keepalive_timeout_s, most, spare)
        connections = Connections(runner.server, limits, note, profile.render)

        for bound in socks:
            listener = await asyncio.get_running_loop().create_server(
                connections.accept,
                sock=bound,
                backlog=_BACKLOG,
                ssl=tls.context if tls else None,
                # A client that never ends its handshake is as bad as one that never ends its headers.
                ssl_handshake_timeout=settings.header_timeout_s if tls else None,
            )
            stack.callback(listener.close)

        host, port = socks[0].getsockname()[:2]
        url = f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
        await stack.enter_async_context(announced(node, url))
        yield node, url


@asynccontextmanager
async def hosted_node(
    settings: NodeSettings, profile: Profile = FULL, source: SettingsSource | None = None
) -> AsyncIterator[Node]:
    """A node without its HTTP side: engines run while the block does."""
    async with AsyncExitStack() as stack:
        tracing = open_tracing(enabled=settings.tracing)
        stack.push_async_callback(tracing.close)

        npu = stack.enter_context(
            npu_source(settings.npu_sysfs, emulated=settings.npu_emulation, energy_sysfs=settings.energy_sysfs)
        )
        found = await probe()

        parts = TaskParts()
        stack.push_async_callback(parts.close)
        if profile.starts_parts:
            for kind in tasks():
                await served_task(kind).start(parts)

        machine = Machine(settings, found, npu)
        models = profile.models(machine)
        check_faults(settings, [model.name if isinstance(model, FailedModel) else model.id for model in models])

        async def look_again() -> None:
            if (now := await probe()).error is None:
                machine.probe = node.probe = now

        budgets = memory_budgets(None, found)
        manager = ModelManager(
            models,
            ModelStore(settings.model_store),
            partial(build_on_demand, machine),
            budgets if settings.memory_budget is None else budgets | {HOST: settings.memory_budget},
            look_again=look_again,
        )
        stack.push_async_callback(manager.stop)

        node = Node(
            settings=settings,
            services=Services(
                manager=manager,
                telemetry=Telemetry(),
                tracing=tracing,
                parts=parts,
                require_proof=settings.npu_require_proof,
            ),
            probe=found,
            npu=npu,
            state=NodeState(started=time.monotonic()),
        )

        if source is not None:
            node.reloader = Reloader(node, source, lambda wanted: configured_model(wanted, machine), budgets[HOST])

        manager.start()

        announcements = None if npu.emulated else uevents()
        if announcements is not None:
            stack.enter_context(listening(announcements, partial(_recovered, node)))
        yield node


def _recovered(node: Node) -> None:
    """After a recovery of the NPU its engines answer their known questions again."""
    node.telemetry.npu_recoveries.inc()
    log.warning(
        "the kernel recovered the NPU: the jobs of all processes were aborted; engines with work are replaced, "
        "the others are examined"
    )
    for model in node.manager.models:
        for place in model.placements:
            if place.device is Device.NPU:
                place.engine.device_recovered()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    own_address(sock)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        remedy = _REMEDIES.get(error.errno or 0, "check host and port")
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error
    sock.setblocking(False)
    return sock


async def _drain(node: Node) -> None:
    """Refuse new work, report it in /health, and give admitted work `drain_timeout_s` to finish."""
    node.state.draining = True
    log.info("draining: %d requests in flight", node.state.running)
    try:
        async with asyncio.timeout(node.settings.drain_timeout_s):
            await node.state.idle.wait()
    except TimeoutError:
        log.warning("%d requests were still running after the drain; they are ended", node.state.running)
        await node.manager.stop()


# How often the status is sent if no watchdog wants it more often.
_STATUS_PERIOD_S = 10.0


class ServiceManager:
    """The socket of the service manager; without one, as in a shell, every call does nothing.

    `address` is the path of a datagram socket, with `@` first for an abstract one. `watchdog_s` is the silence after
    which the manager takes the node for hung and kills it; None when it does not watch.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._address = address
        self._watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> ServiceManager:
        """Read the manager's variables and remove them, so that engines cannot notify in the node's name."""
        variables = os.environ if environment is None else environment
        address = variables.pop("NOTIFY_SOCKET", None)
        watchdog_us = variables.pop("WATCHDOG_USEC", "")
        ours = variables.pop("WATCHDOG_PID", None) in {None, str(os.getpid())}
        watchdog_s = int(watchdog_us) / 1e6 if ours and watchdog_us.isdecimal() else 0
        return cls(address, watchdog_s or None)

    @asynccontextmanager
    async def attended(self, status: Callable[[], str]) -> AsyncIterator[None]:
        """Report that the node is up and, while the block runs, that its event loop turns, with `status` in words.

        Up means that it listens. Its models may still load, for minutes on an NPU; /health says `starting` until then,
        which is for clients and probes. A manager that waited for them would kill the node for a slow compiler.
        """

        async def keep_telling() -> None:
            while self._address is not None:
                await asyncio.sleep(self._watchdog_s / 2 if self._watchdog_s else _STATUS_PERIOD_S)
                self._tell(*(["WATCHDOG=1"] if self._watchdog_s else []), f"STATUS={status()}")

        self._tell("READY=1", f"STATUS={status()}")
        beat = asyncio.create_task(keep_telling(), name="service manager")
        try:
            yield
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat

    def stopping(self) -> None:
        """Report that the node drains and will end."""
        self._tell("STOPPING=1")

    def _tell(self, *assignments: str) -> None:
        if self._address is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            send_datagram(address, "\n".join(assignments).encode())
        except OSError as error:
            # The node serves on without it.
            log.warning("the service manager at %s cannot be notified of %s: %s", self._address, assignments[0], error)
            self._address = None
