"""`python -m tests.chaos.soak [--minutes 30]`: mixed load on a real node while its engines are killed in turn.

Every request must be answered, or refused with an error that says when to try again; the node's memory and descriptors
must stay flat.
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import psutil

from tests.chaos.texts import prompts, texts
from tests.support.nodes import start_node

EMBEDDING_CALLERS = 8
GENERATION_CALLERS = 4
# What a caller may wait for one answer, retries included: an engine's restart takes up to half a minute here.
PATIENCE_S = 150
WARM_UP_S = 5


@dataclass
class Report:
    """What happened. `lost` requests got no answer in time or one that makes no sense."""

    seconds: float
    kills: int = 0
    answered: Counter = field(default_factory=Counter)
    retried: Counter = field(default_factory=Counter)
    lost: list = field(default_factory=list)
    memory: list = field(default_factory=list)
    descriptors: list = field(default_factory=list)

    @property
    def flat(self):
        """Whether memory (within 5 % and 20 MB) and descriptors (16, for connections) stayed where they were."""
        first, last = self.memory[0], self.memory[-1]
        return last <= first * 1.05 + 20e6 and self.descriptors[-1] <= self.descriptors[0] + 16

    def __str__(self):
        return (
            f"{self.seconds:.0f} s, {self.kills} engine kills; answered {dict(self.answered)}; "
            f"tries that were told to come back {dict(self.retried)}; lost {len(self.lost)} {self.lost[:3]}; "
            f"edge process {self.memory[0] / 1e6:.0f} → {self.memory[-1] / 1e6:.0f} MB, "
            f"{self.descriptors[0]} → {self.descriptors[-1]} descriptors"
        )


async def soak(node, seconds, kill_every):
    """Load `node` for so long, killing one engine every `kill_every` seconds; return the report."""
    report = Report(seconds)
    process = psutil.Process(node.process.pid)
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as http:
        callers = [_caller(http, node, report, end, "/embeddings", _embedding(i)) for i in range(EMBEDDING_CALLERS)]
        callers += [_caller(http, node, report, end, "/inference", _generation(i)) for i in range(GENERATION_CALLERS)]
        tasks = [asyncio.create_task(caller) for caller in callers]
        killer = asyncio.create_task(_kill(node, report, end, kill_every))
        await asyncio.sleep(WARM_UP_S)
        while time.monotonic() < end:
            report.memory.append(process.memory_info().rss)
            report.descriptors.append(process.num_fds())
            await asyncio.sleep(min(5.0, max(0.1, end - time.monotonic())))
        await asyncio.gather(*tasks, killer)
    report.memory.append(process.memory_info().rss)
    report.descriptors.append(process.num_fds())
    return report


def _embedding(seed):
    waiting = itertools.cycle(texts(64, seed=seed))
    return lambda: {"texts": [next(waiting) for _ in range(4)]}


def _generation(seed):
    waiting = itertools.cycle(prompts(32, 60, seed=seed))
    return lambda: {"prompt": next(waiting), "max_new_tokens": 24}


async def _caller(http, node, report, end, path, body):
    while time.monotonic() < end:
        request = body()
        until = time.monotonic() + PATIENCE_S
        while True:
            async with http.post(node.url + path, json=request) as reply:
                answer = await reply.json()
            if reply.status == 200:
                report.answered[path] += 1
                break
            if reply.status not in {429, 503} or "Retry-After" not in reply.headers or time.monotonic() > until:
                report.lost.append((path, reply.status, answer))
                break
            report.retried[answer["error"]["code"]] += 1
            await asyncio.sleep(min(2.0, int(reply.headers["retry-after-ms"]) / 1000))


async def _kill(node, report, end, every):
    for model in itertools.cycle(["all-minilm-l6-v2", "smollm2-135m-instruct"]):
        await asyncio.sleep(every)
        if time.monotonic() > end - every / 2:
            return
        pid = (await asyncio.to_thread(node.engine_pids))[model]
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            report.kills += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kill-every", type=float, default=60, metavar="SECONDS")
    options = parser.parse_args()
    # Kills this regular would quarantine the engines, as they should; here the restarts are what is measured.
    with start_node("--log-level", "error", NPU_NODE_CRASH_LIMIT="1000") as node:
        report = asyncio.run(soak(node, options.minutes * 60, options.kill_every))
    print(report)
    return 0 if not report.lost and report.flat else 1


if __name__ == "__main__":
    sys.exit(main())
