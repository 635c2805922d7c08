"""Generation: raw pipelines, the engine process and the node over HTTP, streaming, greedy, 64 new tokens.

Streaming itself takes some of the cores from the pipeline, whoever streams. So the raw pipeline is measured beside
aiohttp alone, too, which sends as many chunks a second to the same client.
"""

import asyncio
import contextlib
import itertools

import openvino_genai

from benchmarks import bare_server, engine, load, workload
from benchmarks.harness import Contender, Figure, RawPipeline, in_turn, show, to_json

TOKENS = 64
# Callers, and tokens of each prompt.
CASES = ((1, 60), (8, 60), (16, 60), (1, 600), (8, 600))
QUICK = ((1, 60), (8, 60), (1, 600))
TARGET = 0.97


async def run(node, store, quick):
    """Measure and print; return the figures."""
    return await compare(node, store, QUICK if quick else CASES, rounds=2 if quick else 5)


async def compare(node, store, cases, rounds):
    """Measure and print these cases; return the figures."""
    installed = store.get("smollm2-135m-instruct")
    figures = []
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(load.session())
        alone = await stack.enter_async_context(engine.running(installed))
        _, bare = stack.enter_context(bare_server.running())
        raw = stack.enter_context(contextlib.closing(RawPipeline("continuous", installed.path)))
        tokenizer = openvino_genai.Tokenizer(str(installed.path))
        for callers, length in cases:
            case = _Case(raw, alone, tokenizer, http, node.url, bare, callers, length)
            figures += await case.compare(rounds)
    return to_json(figures)


class _Case:
    """One number of callers with prompts of one length; no contender sees a prompt twice, each sees the same ones."""

    def __init__(self, raw, alone, tokenizer, http, url, bare, callers, length):
        self._raw, self._alone, self._tokenizer, self._http = raw, alone, tokenizer, http
        self._url, self._bare = url, bare
        self._callers, self._length = callers, length
        self._seeds = {who: itertools.count() for who in ("raw", "beside", "engine", "http")}
        self._firsts = {"raw": [], "beside": [], "engine": [], "http": []}

    def _prompts(self, who):
        # Two for each caller, so that the beginning, when all prompts come at once, is not all that is measured.
        return workload.prompts(max(2 * self._callers, 4), self._length, seed=next(self._seeds[who]))

    def _note(self, who, rate, first_s):
        self._firsts[who].append(first_s * 1e3)
        return rate

    async def raw(self, who="raw"):
        task = {"prompts": self._prompts(who), "tokens": TOKENS, "callers": self._callers}
        result = await asyncio.to_thread(self._raw.run, **task)
        self._rate = result["per_second"]
        return self._note(who, self._rate, result["first_token_s"])

    async def beside(self):
        """Raw beside a bare HTTP server and its client, on the same cores, which stream as many chunks a second."""
        step_s = self._callers / self._rate
        streams = [
            asyncio.create_task(load.stream_for_ever(self._http, self._bare, step_s)) for _ in range(self._callers)
        ]
        try:
            return await self.raw("beside")
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def engine(self):
        prompts = [self._tokenizer.encode(prompt).input_ids.data[0] for prompt in self._prompts("engine")]
        return self._note("engine", *await engine.generate(self._alone, prompts, TOKENS, self._callers))

    async def http(self):
        prompts = self._prompts("http")
        return self._note("http", *await load.generate_all(self._http, self._url, prompts, TOKENS, self._callers))

    async def compare(self, rounds):
        """Measure in turn; with one caller, the time to the first token too."""
        callers, length = self._callers, self._length
        figures = await in_turn(
            f"Generation, {callers} callers, prompts of {length} tokens, {TOKENS} new tokens, streamed",
            "tokens/s",
            [
                Contender("raw ContinuousBatchingPipeline loop", self.raw),
                Contender("raw, while a bare HTTP server and its client stream as many tokens", self.beside),
                Contender("engine process", self.engine),
                Contender("HTTP", self.http, target=TARGET),
            ],
            rounds=rounds,
        )
        if callers > 1:
            return figures
        added = [http - alone for http, alone in zip(self._firsts["http"], self._firsts["engine"], strict=True)]
        firsts = [Figure(f"time to first token, {who}", "ms", values) for who, values in self._firsts.items()]
        firsts.append(Figure("added by the edge (wanted: at most 3 ms at the median)", "ms", added))
        show("", firsts)
        return figures + firsts
