"""What a run must leave as it was: processes, descriptors, files and memory of the nodes, and all of the client's."""

import asyncio
import contextlib
import gc
import threading
import time
from collections import Counter

import psutil

SETTLE_S = 30.0
# Connections that the nodes keep open for a while, logs and caches of a library.
_FILES = 24
# Preparation starts its workers when they are needed, up to a few.
_PROCESSES = 4
_NODE_MB = 64
_CLIENT_MB = 64
_MB = 1024 * 1024


class NodeBaseline:
    """What one node has before the load. `left` tells what it has more of afterwards."""

    def __init__(self, node):
        self._node = node
        self._descriptors = node.process.num_fds()
        self._memory = node.process.memory_info().rss
        self._helpers = _helpers(node.process)
        self._files = _files(node)

    async def left(self):
        deadline = time.monotonic() + SETTLE_S
        problem = "it does not answer"
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                problem = "; ".join(await asyncio.to_thread(lambda: list(self.problems())))
                if not problem:
                    return None
            await asyncio.sleep(0.25)
        return f"node {self._node.number}, {SETTLE_S:.0f} s after the load: {problem}"

    def problems(self):
        node = self._node
        status, body = node.node.health()
        if status != 200 or body["status"] != "ready":
            yield f"/health is {status} {body.get('status')} {[(m['id'], m['state']) for m in body.get('models', [])]}"
            return
        for model in body["models"]:
            if model["in_flight"] or model["queue_depth"]:
                yield f"{model['id']} has {model['in_flight']} jobs in flight, {model['queue_depth']} waiting"
        engines = {engine["pid"] for model in body["models"] for engine in model["engines"] if engine["pid"]}
        children = node.process.children()
        if unknown := [child for child in children if "engines.child" in _name(child) and child.pid not in engines]:
            yield f"{len(unknown)} engine processes that it does not know of"
        if dead := [child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE]:
            yield f"{len(dead)} processes have ended and were not waited for"
        more = _helpers(node.process) - self._helpers
        if max(more.values(), default=0) > _PROCESSES:
            yield f"more processes than before: {dict(more)}"
        if (now := node.process.num_fds()) > self._descriptors + _FILES:
            yield f"{now} descriptors, {self._descriptors} before the load"
        if (grown := node.process.memory_info().rss - self._memory) > _NODE_MB * _MB:
            yield f"{grown // _MB} MB more memory than before the load"
        if new := _files(node) - self._files:
            yield f"new files: {sorted(new)}"


class ClientBaseline:
    """What this process has before the client is made."""

    def __init__(self):
        self._tasks = asyncio.all_tasks()
        self._threads = set(threading.enumerate())
        self._memory = None

    def warmed_up(self):
        """The client's caches and libraries are loaded: memory counts from now."""
        gc.collect()
        self._memory = psutil.Process().memory_info().rss

    def left(self, addresses):
        """All that is left of a closed client whose nodes have these addresses."""
        if tasks := asyncio.all_tasks() - self._tasks:
            yield f"tasks: {[task.get_name() for task in tasks]}"
        # Threads of asyncio's own pool are kept for the next work.
        threads = [t.name for t in set(threading.enumerate()) - self._threads if not t.name.startswith("asyncio_")]
        if threads:
            yield f"threads: {threads}"
        connections = [
            found
            for found in psutil.Process().net_connections("tcp")
            if found.raddr and found.raddr.ip in addresses and found.status in {"ESTABLISHED", "CLOSE_WAIT", "SYN_SENT"}
        ]
        if connections:
            yield f"{len(connections)} connections"
        gc.collect()
        if self._memory and (grown := psutil.Process().memory_info().rss - self._memory) > _CLIENT_MB * _MB:
            yield f"{grown // _MB} MB of memory"


def _name(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _helpers(process):
    """Its processes that are no engines, counted by what they run."""
    names = [" ".join(_name(child).split()[1:3]) for child in process.children(recursive=True)]
    return Counter(name for name in names if name and "engines.child" not in name)


def _files(node):
    """Files of its store and in its temporary directory. Its compile cache is to grow."""
    return {str(path) for root in (node.store, node.temporary) for path in root.rglob("*") if path.is_file()}
