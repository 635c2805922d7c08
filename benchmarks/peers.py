"""The node beside other servers on this machine: `--peer NAME=URL`, plain OpenAI-compatible HTTP, each in turn.

A peer is compared in what it serves: embeddings, generation or both, with the first model that it lists.
"""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from functools import partial

import aiohttp

from benchmarks import workload
from benchmarks.harness import Contender, in_turn, to_json
from benchmarks.load import session

# By name, the addresses of other servers; set by the command.
PEERS = {}
TOKENS = 64
EMBEDDING_CASES = ((1, 1), (1, 32), (64, 1), (64, 2))
GENERATION_CASES = ((60, 1), (60, 8), (60, 16), (600, 1), (600, 8))


@dataclass(frozen=True)
class Server:
    """A server with the model that is asked; `url` is its address without /v1."""

    name: str
    url: str
    model: str


async def run(node, _store, quick):
    """Measure and print; return the figures. The node is the baseline of all ratios."""
    figures = []
    async with session() as http:
        for path, own, cases, measure in (
            ("/v1/embeddings", "all-minilm-l6-v2", EMBEDDING_CASES, _texts_per_second),
            ("/v1/completions", "smollm2-135m-instruct", GENERATION_CASES, _tokens_per_second),
        ):
            servers = [Server("node", node.url, own)]
            servers += [server for name, url in PEERS.items() if (server := await _serving(http, name, url, path))]
            if len(servers) == 1:
                continue
            for size, callers in cases[:2] if quick else cases:
                unit = "texts/s" if path == "/v1/embeddings" else "tokens/s"
                what = f"{size} texts a request" if path == "/v1/embeddings" else f"prompts of {size} tokens, streamed"
                contenders = [Contender(s.name, measure(http, s, size, callers, quick)) for s in servers]
                figures += await in_turn(f"{what}, {callers} callers", unit, contenders, rounds=2 if quick else 5)
    if not figures:
        print("no peers: name servers on this machine by --peer NAME=URL\n")
    return to_json(figures)


async def unreachable():
    """The names of the peers that do not answer, so that a run can say so before it measures for minutes."""

    async def answers(http, url):
        try:
            async with http.get(url.rstrip("/").removesuffix("/v1") + "/v1/models") as reply:
                return bool((await reply.json(content_type=None))["data"])
        except (OSError, aiohttp.ClientError, ValueError, KeyError, TypeError):
            return False

    async with session() as http:
        return [name for name, url in PEERS.items() if not await answers(http, url)]


async def _serving(http, name, url, path):
    """The server with its first model, if it answers at `path`. Raises ConnectionError where nothing listens."""
    url = url.rstrip("/").removesuffix("/v1")
    async with http.get(url + "/v1/models") as reply:
        model = (await reply.json(content_type=None))["data"][0]["id"]
    ask = {"input": "a"} if path == "/v1/embeddings" else {"prompt": "a", "max_tokens": 1}
    async with http.post(url + path, json={"model": model} | ask) as reply:
        await reply.read()
        return Server(name, url, model) if reply.status == 200 else None


def _texts_per_second(http, server, size, callers, quick):
    """A measurement of embeddings: requests of `size` texts by so many callers."""
    texts = workload.texts(128 if quick else 512)
    bodies = [{"model": server.model, "input": texts[i : i + size]} for i in range(0, len(texts), size)]

    async def measure():
        rate = await _per_second(partial(_post, http, server.url + "/v1/embeddings"), bodies, callers)
        return rate * size

    return measure


def _tokens_per_second(http, server, length, callers, _quick):
    """A measurement of generation: greedy streams of TOKENS tokens; no server sees a prompt twice."""
    seeds = itertools.count()

    async def measure():
        prompts = workload.prompts(max(callers, 4), length, seed=next(seeds))
        more = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        bodies = [{"model": server.model, "prompt": prompt} | more for prompt in prompts]
        return TOKENS * await _per_second(partial(_post, http, server.url + "/v1/completions"), bodies, callers)

    return measure


async def _post(http, url, body):
    async with http.post(url, data=json.dumps(body), headers={"Content-Type": "application/json"}) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


async def _per_second(post, bodies, callers):
    """Requests per second of a closed loop."""
    waiting = iter(bodies)

    async def caller():
        for body in waiting:
            await post(body)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(bodies) / (time.perf_counter() - began)
