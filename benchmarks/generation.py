"""Generation: raw pipelines, the engine process and the node over HTTP, streaming, greedy, 64 new tokens."""

import itertools

import openvino_genai

from benchmarks import engine, load, workload
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
    async with load.session() as http, engine.running(installed) as alone:
        tokenizer = openvino_genai.Tokenizer(str(installed.path))
        raw = RawPipeline("continuous", installed.path)
        try:
            for callers, length in cases:
                case = _Case(raw, alone, tokenizer, http, node.url, callers, length)
                figures += await case.compare(rounds)
        finally:
            raw.close()
    return to_json(figures)


class _Case:
    """One number of callers with prompts of one length; no contender sees a prompt twice, each sees the same ones."""

    def __init__(self, raw, alone, tokenizer, http, url, callers, length):
        self._raw, self._alone, self._tokenizer, self._http, self._url = raw, alone, tokenizer, http, url
        self._callers, self._length = callers, length
        self._seeds = {who: itertools.count() for who in ("raw", "engine", "http")}
        self._firsts = {"raw": [], "engine": [], "http": []}

    def _prompts(self, who):
        # Two for each caller, so that the beginning, when all prompts come at once, is not all that is measured.
        return workload.prompts(max(2 * self._callers, 4), self._length, seed=next(self._seeds[who]))

    def _note(self, who, rate, first_s):
        self._firsts[who].append(first_s * 1e3)
        return rate

    async def raw(self):
        result = self._raw.run(prompts=self._prompts("raw"), tokens=TOKENS, callers=self._callers)
        return self._note("raw", result["per_second"], result["first_token_s"])

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
