"""The nodes of a chaos run: real ones, each behind a proxy and with a model store of its own; and one name for all."""

import asyncio
import contextlib
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import threading
import urllib.request
from pathlib import Path

import psutil

from tests.chaos.oracle import FULL_PRECISION
from tests.chaos.proxies import Proxies, Proxy
from tests.chaos.ranking import RERANKER
from tests.chaos.schedule import NODES
from tests.support.cross_encoders import write_tiny
from tests.support.nodes import start_node
from tests.support.published import install
from tests.support.tiny_encoder import write_encoder
from worker_node.models.store import ModelStore

FLEET_NAME = "fleet.chaos.invalid"
SECOND_ENCODER = "tiny-encoder"
HOSTS = tuple(f"127.0.0.{number + 2}" for number in range(NODES))
EMBEDDER, GENERATOR = "all-minilm-l6-v2", "smollm2-135m-instruct"


def prepare_stores(root, store):
    """Make a store of its own for each node: links to the installed models, a second, tiny encoder and a reranker."""
    write_encoder(root / "encoder")
    write_tiny(root / RERANKER)
    first = ModelStore(root / "store0")
    install(first, root / "encoder", SECOND_ENCODER)
    install(first, root / RERANKER, RERANKER)
    for number in range(NODES):
        directory = root / f"store{number}"
        for model in (EMBEDDER, GENERATOR):
            shutil.copytree(store.root / model, directory / model, copy_function=_link)
        for model in (SECOND_ENCODER, RERANKER) if number else ():
            shutil.copytree(first.root / model, directory / model)


def _toml(value):
    """A value in TOML: JSON, but for tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(content)}" for name, content in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _link(source, target):
    # Manifests are damaged in a run, so each store has its own; weights are shared.
    if Path(source).suffix == ".json":
        shutil.copyfile(source, target)
    else:
        os.link(source, target)


class Node:
    """One node and what can happen to it. All methods that wait are coroutines."""

    def __init__(self, stack, number, root, proxy):
        self.number = number
        self.store = root / f"store{number}"
        self.proxy = proxy
        self.alias_of = EMBEDDER
        self.one_fault = asyncio.Lock()
        self._stack = stack
        self._compiled = root / f"compiled{number}"
        self.temporary = root / f"temporary{number}"
        self.temporary.mkdir()
        self.node = None
        self._config = root / f"node{number}.toml"
        # Changed settings of the reranker: its engine is replaced.
        self._documents_limit = 100

    def _settings(self, *, ranks=True):
        models = [
            {"name": name, "streams": 1, "precision": "f32", "aliases": ["prod"] if name == self.alias_of else []}
            for name in (EMBEDDER, SECOND_ENCODER)
        ]
        precise = [{"device": "CPU", "plugin_config": FULL_PRECISION}]
        models.append({"name": GENERATOR, "cache_size_gb": 1, "placements": precise})
        if ranks:
            models.append({"name": RERANKER, "precision": "f32", "documents_limit": self._documents_limit})
        return "models = " + _toml(models) + "\n"

    async def start(self, *, ready=False):
        self._config.write_text(self._settings())
        self.node = await asyncio.to_thread(
            self._stack.enter_context,
            start_node(
                "--log-level",
                "error",
                "--config",
                str(self._config),
                ready=ready,
                NPU_NODE_MODEL_STORE=str(self.store),
                NPU_NODE_COMPILE_CACHE=str(self._compiled),
                NPU_NODE_EMBEDDING_CACHE="0",
                NPU_NODE_WATCHDOG_S="8",
                NPU_NODE_QUARANTINE_S="10",
                NPU_NODE_CRASH_LIMIT="1000",
                NPU_NODE_CANARY_INTERVAL_S="10",
                TMPDIR=str(self.temporary),
            ),
        )
        await self._connect()

    async def _connect(self):
        await self.proxy.listen(int(self.node.url.rpartition(":")[2]))

    @property
    def process(self):
        return psutil.Process(self.node.process.pid)

    def engine_pid(self, model):
        try:
            _, body = self.node.health()
        except OSError:
            return None  # it is being restarted, or stopped
        return next((m["engines"][0]["pid"] for m in body["models"] if m["id"] == model), None)

    # What the schedule's kinds do: each method strikes, waits, and undoes.

    async def engine_kill(self, _seconds, model):
        with contextlib.suppress(ProcessLookupError):
            if pid := await asyncio.to_thread(self.engine_pid, model):
                os.kill(pid, signal.SIGKILL)

    async def engine_hang(self, seconds, model):
        pid = await asyncio.to_thread(self.engine_pid, model)
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                os.kill(pid, signal.SIGCONT)

    async def node_freeze(self, seconds, _detail):
        self.node.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.node.process.send_signal(signal.SIGCONT)

    async def node_kill(self, seconds, _detail):
        self.node.process.kill()
        await self.proxy.stop()
        await asyncio.to_thread(self.node.process.wait)
        await asyncio.sleep(seconds)
        await self.start()

    async def node_restart(self, _seconds, _detail):
        await asyncio.to_thread(self.node.terminate)
        await self.start()

    async def alias_change(self, seconds, detail):
        self.alias_of = SECOND_ENCODER if self.alias_of == EMBEDDER else EMBEDDER
        await self.node_restart(seconds, detail)

    async def model_withdrawn(self, seconds, model):
        """A model is unloaded, so that its next request loads it again; or the reranker is removed, and comes back."""
        if model == "removed":
            self._config.write_text(self._settings(ranks=False))
            await self._post("/admin/reload")
        else:
            await self._post(f"/models/{model}/unload")
        await asyncio.sleep(seconds)
        if model == "removed":
            self._config.write_text(self._settings())
            await self._post("/admin/reload")
        else:
            await self._post(f"/models/{model}/load")

    async def settings_reload(self, seconds, how):
        """An editor empties the file, and writes it when it has changed the settings of the reranker."""
        self._documents_limit += 1
        self._config.write_text("")
        if how == "request":
            await self._post("/admin/reload")
        await asyncio.sleep(seconds)
        self._config.write_text(self._settings())
        if how == "request":
            await self._post("/admin/reload")
        elif how == "signal":
            self.node.process.send_signal(signal.SIGHUP)

    async def _post(self, path):
        request = urllib.request.Request(self.node.url + path, method="POST")  # noqa: S310
        with contextlib.suppress(OSError, http.client.HTTPException):  # a refusal, too
            await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).close())  # noqa: S310

    async def slow_replies(self, seconds, delay):
        await self._replies(seconds, latency=delay)

    async def cut_replies(self, seconds, after):
        await self._replies(seconds, cut_after=after)

    async def silent_network(self, seconds, _detail):
        await self._replies(seconds, silent=True, probes=True)

    async def refused_connections(self, seconds, _detail):
        await self.proxy.stop()
        await asyncio.sleep(seconds)
        await self._connect()

    async def full_disk(self, seconds, model):
        # What a full disk does to a process, for this node only: no file can grow. An engine has to restart so.
        pid = self.node.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            await self.engine_kill(0, model)
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(self._allow_files, limits)

    def _allow_files(self, limits):
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)

    async def damaged_store(self, seconds, how):
        # What is loaded must not be disturbed: neither this model nor the others.
        content = None if how == "missing" else b"\x00garbage"
        await self._damaged(seconds, self.store / SECOND_ENCODER / "npu-node.json", content, half=how == "truncated")

    async def damaged_weights(self, seconds, _detail):
        # Its engine cannot load again before they are repaired. The other models go on.
        await self._damaged(seconds, self.store / SECOND_ENCODER / "openvino_model.bin", b"", kill=True)

    async def _damaged(self, seconds, path, content, *, half=False, kill=False):
        # Moved away and not written to: the file may be mapped by an engine, and shared with another store.
        whole = path.with_name(path.name + ".whole")
        path.rename(whole)
        if half:
            content = whole.read_bytes()[: whole.stat().st_size // 2]
        if content is not None:
            path.write_bytes(content)
        if kill:
            await self.engine_kill(0, SECOND_ENCODER)
        await asyncio.sleep(seconds)
        whole.replace(path)

    async def _replies(self, seconds, **fault):
        await self.proxy.set(**fault)
        await asyncio.sleep(seconds)
        await self.proxy.set()


class FrozenResolver:
    """Resolves FLEET_NAME to the proxies; while `frozen`, look-ups of it do not return."""

    def __init__(self, hosts):
        self._hosts = hosts
        self._thawed = threading.Event()
        self._thawed.set()
        self._original = socket.getaddrinfo

    def freeze(self):
        self._thawed.clear()

    def thaw(self):
        self._thawed.set()

    @contextlib.contextmanager
    def installed(self):
        socket.getaddrinfo = self._resolve
        try:
            yield self
        finally:
            self.thaw()
            socket.getaddrinfo = self._original

    def _resolve(self, host, port, *args, **kwargs):
        if host != FLEET_NAME:
            return self._original(host, port, *args, **kwargs)
        self._thawed.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self._hosts]


@contextlib.asynccontextmanager
async def world(root, store):
    """Three nodes that serve, under the addresses of HOSTS at one port. Yields them, their proxies and the port."""
    await asyncio.to_thread(prepare_stores, root, store)
    with socket.socket() as probe:
        probe.bind((HOSTS[0], 0))
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        async with Proxies(HOSTS, port) as proxies:
            nodes = [
                Node(stack, number, root, Proxy(proxies, number, f"http://{host}:{port}"))
                for number, host in enumerate(HOSTS)
            ]
            try:
                for node in nodes:
                    await node.start(ready=True)
                yield nodes, proxies, port
            finally:
                for node in nodes:
                    with contextlib.suppress(ProcessLookupError, AttributeError):
                        node.node.process.send_signal(signal.SIGCONT)
