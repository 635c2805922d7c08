"""The load that the benchmarks put on a node: closed loops of callers over kept-alive connections."""

import asyncio
import json
import statistics
import time

import aiohttp

BINARY = {"Accept": "application/octet-stream"}


async def embed_one_by_one(http, url, texts, callers):
    """Texts per second, each text a request of its own."""
    waiting = iter(texts)

    async def caller():
        for text in waiting:
            async with http.post(url + "/embeddings", json={"texts": [text]}, headers=BINARY) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(texts) / (time.perf_counter() - began)


async def embed_in_batches(http, url, texts, size, callers=1):
    """Texts per second, `size` texts a request, `callers` requests at a time."""
    waiting = iter(range(0, len(texts), size))

    async def caller():
        for start in waiting:
            body = {"texts": texts[start : start + size]}
            async with http.post(url + "/embeddings", json=body, headers=BINARY) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(texts) / (time.perf_counter() - began)


async def generate(http, url, prompt, tokens):
    """Stream one answer; return the seconds to its first token and the tokens it had."""
    body = {"prompt": prompt, "raw": True, "max_new_tokens": tokens, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    first = None
    async with http.post(url + "/inference", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - began
                last = line
    return first, json.loads(last[6:])["usage"]["completion_tokens"]


async def stream_for_ever(http, url, step_s):
    """Stream answers of 64 chunks from a `bare_server`, one chunk every `step_s`, until cancelled."""
    body = {"max_tokens": 64, "step_s": step_s}
    while True:
        async with http.post(url + "/v1/chat/completions", json=body) as reply:
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    json.loads(line[6:])


async def generate_all(http, url, prompts, tokens, callers):
    """Output tokens per second and the median time to first token in seconds."""
    waiting = iter(prompts)
    results = []

    async def caller():
        for prompt in waiting:
            result = await generate(http, url, prompt, tokens)
            results.append(result)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    seconds = time.perf_counter() - began
    return sum(count for _, count in results) / seconds, statistics.median(first for first, _ in results)


def session():
    """A client without limits or timeouts of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
    )
