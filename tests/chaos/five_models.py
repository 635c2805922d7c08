"""Five models on a budget for two: random requests on one node, and what was lost, taken and delayed meanwhile.

    python -m tests.chaos.five_models --seconds 600

The models are copies of the two embedded ones under other names. An event loop without work is measured beside the
node's: where it is as late, the machine was. Exit status 1 if a request was lost, the memory of the engines exceeded
the budget by more than 10 %, or the node's event loop was late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.chaos import idle_loop
from tests.support.nodes import start_node
from worker_node.devices.memory import resident_memory
from worker_node.models.directory import MANIFEST_FILE
from worker_node.models.store import ModelStore

EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
COPIES = {"texts-a": EMBEDDER, "texts-b": EMBEDDER, "writer-a": WRITER}
BUDGET = 2_000_000_000
CALLERS = 4
_LAG = "npu_node_event_loop_lag_seconds"


@dataclass(frozen=True)
class LoopTime:
    """Seconds that the thread of the event loop ran, and waited for a CPU that others had.

    A loop that is late although its thread neither ran nor waited was blocked.
    """

    ran: float
    waited: float

    @classmethod
    def of(cls, pid: int) -> LoopTime:
        """The times of a process's first thread so far."""
        ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()
        return cls(int(ran) / 1e9, int(waited) / 1e9)

    def since(self, before: LoopTime) -> LoopTime:
        """What was added."""
        return LoopTime(self.ran - before.ran, self.waited - before.waited)


@dataclass
class Outcome:
    """Answers by kind; `lost` are those that nothing justifies. Seconds and bytes."""

    answers: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    most: int = 0
    over: float = 0.0
    lag_p999: float = 0.0
    idle_lags: list[float] = field(default_factory=list)
    loop: LoopTime = field(default_factory=lambda: LoopTime(0.0, 0.0))


def copy_models(root: Path) -> None:
    """The two embedded models and their copies; weights are links."""
    store = ModelStore()
    for name, source in {EMBEDDER: EMBEDDER, WRITER: WRITER, **COPIES}.items():
        copy_model(store.get(source).path, root / name)


def copy_model(source: Path, target: Path) -> None:
    """A model under the name of another directory; its weights are links."""
    shutil.copytree(source, target, copy_function=os.link)
    manifest = json.loads((target / MANIFEST_FILE).read_bytes())
    (target / MANIFEST_FILE).unlink()
    (target / MANIFEST_FILE).write_text(json.dumps(manifest | {"id": target.name}))


async def call(http: aiohttp.ClientSession, url: str, rng: random.Random, names: list[str], seen: Outcome) -> None:
    """One random request; a 503 that says why and when to come again is no loss."""
    name = rng.choice(names)
    if "texts" in name or name == EMBEDDER:
        path, body = "/v1/embeddings", {"model": name, "input": ["a text"] * rng.randint(1, 16)}
    else:
        prompt = "word " * rng.randint(1, 200)
        path, body = "/v1/completions", {"model": name, "prompt": prompt, "max_tokens": rng.randint(1, 24)}
    try:
        async with http.post(url + path, json=body) as reply:
            told = await reply.json()
            if reply.status == 200:
                seen.answers["answered"] += 1
                return
            code = told["error"]["code"]
            seen.answers[f"{reply.status} {code}"] += 1
            justified = reply.status == 503 and code in {"insufficient_memory", "model_loading"}
            if not justified or "Retry-After" not in reply.headers:
                seen.lost.append(f"{name}: {reply.status} {told['error']['message'][:200]}")
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.lost.append(f"{name}: {type(error).__name__} {error}")


async def watch(http: aiohttp.ClientSession, url: str, seen: Outcome) -> None:
    """Measure the memory of all engine processes, four times a second."""
    while True:
        async with http.get(url + "/health") as reply:
            health = await reply.json()
        pids = [engine["pid"] for model in health["models"] for engine in model["engines"] if engine["pid"]]
        seen.most = max(seen.most, sum(resident_memory(pid) or 0 for pid in pids))
        await asyncio.sleep(0.25)


def lag_quantile(text: str, quantile: float) -> float:
    """The upper bound of the histogram's bucket that holds the quantile."""
    buckets = []
    for line in text.splitlines():
        if line.startswith(_LAG + "_bucket"):
            bound = line.split('le="')[1].split('"')[0]
            buckets.append((float(bound), float(line.split()[-1])))
    total = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, count in buckets if count >= quantile * total), 0.0)


async def run(url: str, seconds: float, seed: int) -> Outcome:
    """Random requests for so long."""
    seen, names = Outcome(), [EMBEDDER, WRITER, *COPIES]
    until = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=180)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        watcher = asyncio.create_task(watch(http, url, seen))

        async def caller(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            while time.monotonic() < until:
                await call(http, url, rng, names, seen)
                await asyncio.sleep(rng.choice([0.0, 0.1, 1.0]))

        await asyncio.gather(*(caller(number) for number in range(CALLERS)))
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        async with http.get(url + "/metrics") as reply:
            seen.lag_p999 = lag_quantile(await reply.text(), 0.999)
    return seen


def measure(seconds: float, seed: int = 1, **more: str) -> Outcome:
    """Start a node with the five models, none of them configured, and ask it for so long."""
    with tempfile.TemporaryDirectory(dir=ModelStore().root.parent) as directory:
        root = Path(directory)
        copy_models(root)
        settings = {"NPU_NODE_MODEL_STORE": directory, "NPU_NODE_MODELS": "[]", "NPU_NODE_MEMORY_BUDGET": str(BUDGET)}
        with start_node(ready=False, **settings, **more) as node:
            before = LoopTime.of(node.process.pid)
            with idle_loop.beside() as idle_lags:
                seen = asyncio.run(run(node.url, seconds, seed))
            seen.idle_lags = sorted(idle_lags)
            seen.loop = LoopTime.of(node.process.pid).since(before)
            return seen


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine-nice", default="5", help="the node's setting engine_nice")
    args = parser.parse_args()
    seen = measure(args.seconds, args.seed, NPU_NODE_ENGINE_NICE=args.engine_nice)
    print(f"answers: {dict(seen.answers)}; lost: {len(seen.lost)} {seen.lost[:5]}")
    print(f"most memory: {seen.most / 1e6:.0f} MB of {BUDGET / 1e6:.0f} ({seen.most / BUDGET:.0%})")
    print(f"event loop lag p99.9: at most {seen.lag_p999 * 1e3:.0f} ms")
    idle = seen.idle_lags
    print(f"an idle loop beside it: p99.9 {idle[int(len(idle) * 0.999)] * 1e3:.0f} ms, worst {idle[-1] * 1e3:.0f} ms")
    print(f"the loop's thread ran {seen.loop.ran:.1f} s and waited {seen.loop.waited:.1f} s for a CPU")
    return int(bool(seen.lost) or seen.most > 1.1 * BUDGET or seen.lag_p999 > 0.05)


if __name__ == "__main__":
    sys.exit(main())
