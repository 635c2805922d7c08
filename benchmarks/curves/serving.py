"""Curves of a running node: streams, prompts, connections and models. CPU time, so that other work disturbs little."""

import asyncio
import json
import os
import resource
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.curves.curve import Curve, Series
from benchmarks.edge_cpu import cpu_seconds
from benchmarks.load import session
from benchmarks.node import start_node
from benchmarks.workload import prompts as make_prompts
from worker_node.devices.memory import resident_memory
from worker_node.models.directory import MANIFEST_FILE

EMBEDDER, GENERATOR = "all-minilm-l6-v2", "smollm2-135m-instruct"
TOKENS = 16
_MB = 1e6


def _node(*models, **settings):
    configured = json.dumps([{"name": model, "placements": ["CPU"]} for model in models])
    return start_node("--log-level", "warning", NPU_NODE_MODELS=configured, NPU_NODE_EMBEDDING_CACHE="0", **settings)


def _copy_model(source, target):
    """A model under the name of another directory; its weights are links."""
    shutil.copytree(source, target, copy_function=os.link)
    manifest = json.loads((target / MANIFEST_FILE).read_bytes())
    (target / MANIFEST_FILE).unlink()
    (target / MANIFEST_FILE).write_text(json.dumps(manifest | {"id": target.name}))


def _resident(pid):
    return (resident_memory(pid) or 0) / _MB


async def streams(_store, quick):
    """So many answers streamed at once: the edge's CPU time for each token, the engine's, and the edge's memory."""
    points = [1, 4, 16, 64] if quick else [1, 4, 16, 64, 128, 256]
    edge_ms, engine_ms, memory = [], [], []
    with _node(GENERATOR) as node:
        edge, engine = node.process.pid, node.engine_pids()[GENERATOR]
        async with session() as http:

            async def stream(prompt):
                body = {"model": GENERATOR, "prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
                async with http.post(node.url + "/v1/completions", json=body) as reply:
                    # On a machine that is too slow for so many, some are refused.
                    assert reply.status in {200, 429}, await reply.text()
                    await reply.read()
                    return reply.status == 200

            await stream("warm")
            for count in points:
                rounds = max(1, 16 // count)
                before = cpu_seconds(edge), cpu_seconds(engine)
                answered = 0
                for number in range(rounds):
                    texts = make_prompts(count, 60, seed=number + count)
                    answered += sum(await asyncio.gather(*map(stream, texts)))
                tokens = answered * TOKENS
                edge_ms.append((cpu_seconds(edge) - before[0]) / tokens * 1e3)
                engine_ms.append((cpu_seconds(engine) - before[1]) / tokens * 1e3)
                memory.append(_resident(edge))
    series = [
        Series("edge, CPU a token", "ms", edge_ms),
        Series("engine, CPU a token", "ms", engine_ms),
        Series("edge, memory", "MB", memory),
    ]
    return Curve("streams", "streams at once", points, series)


async def prompts(_store, quick):
    """Prompts of so many tokens: the engine's CPU time to the first token, and its memory."""
    points = [100, 300, 1000, 3000] if quick else [100, 300, 1000, 3000, 8000]
    seconds, memory = [], []
    with _node(GENERATOR) as node:
        engine = node.engine_pids()[GENERATOR]
        async with session() as http:
            for count in (50, *points):
                prompt = [1000 + (count * 7919 + index * 104_729) % 20_000 for index in range(count)]
                body = {"model": GENERATOR, "prompt": prompt, "max_tokens": 1}
                before = cpu_seconds(engine)
                async with http.post(node.url + "/v1/completions", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                seconds.append(cpu_seconds(engine) - before)
                memory.append(_resident(engine))
    series = [Series("to the first token", "CPU s", seconds[1:]), Series("engine, memory", "MB", memory[1:])]
    return Curve("prompts", "tokens of the prompt", points, series)


async def connections(_store, quick):
    """So many open connections without a request: the edge's memory, its CPU at rest and for a request beside them."""
    points = [10, 100, 1000] if quick else [10, 100, 1000, 10_000]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    memory, rest, request = [], [], []
    settings = {"NPU_NODE_MAX_CONNECTIONS": "20000", "NPU_NODE_HEADER_TIMEOUT_S": "600"}
    try:
        with _node(EMBEDDER, **settings, NPU_NODE_KEEPALIVE_TIMEOUT_S="600") as node, ExitStack() as stack:
            pid, port = node.process.pid, int(node.url.rsplit(":", 1)[1])
            async with session() as http:
                await _embed(http, node.url, EMBEDDER, 20)
                opened = 0
                for count in points:
                    for _ in range(count - opened):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        stack.callback(writer.close)
                    opened = count
                    await asyncio.sleep(1.0)
                    rest.append(await _at_rest(pid, 3.0))
                    before = cpu_seconds(pid)
                    await _embed(http, node.url, EMBEDDER, 100)
                    request.append((cpu_seconds(pid) - before) / 100 * 1e3)
                    memory.append(_resident(pid))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    series = [
        Series("edge, memory", "MB", memory),
        Series("edge at rest, share of a core", "%", rest),
        Series("edge, CPU for an embedding beside them", "ms", request),
    ]
    return Curve("connections", "open connections", points, series)


async def models(store, quick):
    """So many embedding models loaded: memory of edge and engines, the edge's CPU at rest and for a request."""
    points = [1, 2, 4] if quick else [1, 2, 5, 10, 20]
    edge, engines, rest, request = [], [], [], []
    for count in points:
        with tempfile.TemporaryDirectory(dir=store.root.parent) as directory:
            names = [f"texts-{number}" for number in range(count)]
            for name in names:
                _copy_model(store.get(EMBEDDER).path, Path(directory) / name)
            with _node(*names, NPU_NODE_MODEL_STORE=directory) as node:
                pid = node.process.pid
                async with session() as http:
                    await _embed(http, node.url, names[0], 50)
                    before = cpu_seconds(pid)
                    await _embed(http, node.url, names[0], 100)
                    request.append((cpu_seconds(pid) - before) / 100 * 1e3)
                rest.append(await _at_rest(pid, 5.0))
                edge.append(_resident(pid))
                engines.append(sum(map(_resident, node.engine_processes())))
    series = [
        Series("edge, memory", "MB", edge),
        Series("engines, memory", "MB", engines),
        Series("edge at rest, share of a core", "%", rest),
        Series("edge, CPU for an embedding", "ms", request),
    ]
    return Curve("models", "models loaded", points, series)


async def _embed(http, url, model, count):
    for number in range(count):
        async with http.post(url + "/v1/embeddings", json={"model": model, "input": f"a text {number}"}) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()


async def _at_rest(pid, seconds):
    """The share of a core in per cent that a process takes while nothing asks for it."""
    before, began = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began) * 100
