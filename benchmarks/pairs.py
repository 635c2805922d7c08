"""Two checkouts of the node side by side, each loaded for some seconds in turn: this one ÷ the other, by medians.

    python -m benchmarks.pairs /path/to/the/other/checkout [--pairs 7] [--seconds 4] [--only chat]
    python -m benchmarks.pairs . --set NPU_NODE_ENERGY_SYSFS=/tmp/sysfs       # what one setting costs

Both nodes run all the time, so whatever else the machine does meets both; the one that is not asked is idle.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil

HERE = Path(__file__).parents[1]
CHAT = {"model": "smollm2-135m-instruct", "max_tokens": 64, "temperature": 0, "stream": True, "ignore_eos": True}


def start(tree, **settings):
    """A node of that checkout; returns its process and its URL."""
    command = [sys.executable, "-m", "worker_node", "serve", "--port", "0", "--log-level", "warning"]
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "NPU_NODE_EMBEDDING_CACHE": "0"} | settings
    process = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("listening on "), f"the node of {tree} said {line!r}"
    return process, line.split()[-1]


async def embed(http, url, number, texts):
    words = [f"text {number} {index} about rivers, mountains and the sea" for index in range(texts)]
    async with http.post(f"{url}/embeddings", json={"texts": words}) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()
    return texts


async def chat(http, url, number):
    body = CHAT | {"messages": [{"role": "user", "content": f"Tell story {number} of a river and the sea."}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return sum([line.startswith(b"data: {") async for line in reply.content])


async def rate(callers, seconds, once):
    """How much is done a second by that many callers, each with one request after another."""
    began, numbers = time.perf_counter(), iter(range(10**9))

    async def caller():
        done = 0
        while time.perf_counter() - began < seconds:
            done += await once(f"{began} {next(numbers)}")
        return done

    done = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return done, time.perf_counter() - began


async def main(other, pairs, seconds, wanted, settings):
    trees = {"this": start(HERE, **settings), "other": start(other)}
    kinds = {
        "embeddings, 32 callers": (32, lambda http, url, number: embed(http, url, number, 1)),
        "embeddings, 64 texts a request": (1, lambda http, url, number: embed(http, url, number, 64)),
        "chat, 1 caller": (1, chat),
        "chat, 8 callers": (8, chat),
    }
    ratios = {}
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
            for pair in range(-1, pairs):
                for kind, (callers, once) in kinds.items():
                    if not kind.startswith(wanted):
                        continue
                    found = {}
                    for name in ("this", "other") if pair % 2 else ("other", "this"):
                        process, url = trees[name]
                        edge = psutil.Process(process.pid)
                        before = sum(edge.cpu_times()[:2])
                        done, took = await rate(callers, seconds, lambda number: once(http, url, number))  # noqa: B023
                        found[name] = done / took, (sum(edge.cpu_times()[:2]) - before) / done
                    if pair >= 0:  # the first warms both up
                        (speed, cpu), (other_speed, other_cpu) = found["this"], found["other"]
                        ratios.setdefault(kind, []).append((speed / other_speed, cpu / other_cpu))
    finally:
        for process, _ in trees.values():
            process.terminate()
            process.wait(30)
    for kind, values in ratios.items():
        for what, found in zip(("a second", "CPU of the edge"), zip(*values, strict=True), strict=True):
            print(f"{kind}, {what}: {statistics.median(found):.3f} ({min(found):.3f} … {max(found):.3f})")
    print(json.dumps(ratios))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="", help="embeddings or chat")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of this one alone")
    options = parser.parse_args()
    variables = dict(pair.split("=", 1) for pair in options.set)
    asyncio.run(main(options.other.resolve(), options.pairs, options.seconds, options.only, variables))
