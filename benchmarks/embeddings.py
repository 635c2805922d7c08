"""Embeddings: raw AsyncInferQueue, the engine process and the node over HTTP; 1 and 32 callers and batches of 64.

One caller of one text is compared with raw inference of one text after another, and beside it with the least that HTTP
can cost: aiohttp alone that runs raw inference in its own process.
"""

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import bare_server, engine, load, raw, workload
from benchmarks.harness import Contender, RawPipeline, in_turn, to_json
from worker_node.devices.npu import stand_in_counter

BATCH = 64


async def run(node, store, quick):
    """Measure and print; return the figures."""
    texts = workload.texts(128 if quick else 256)
    installed = store.get("all-minilm-l6-v2")
    async with contextlib.AsyncExitStack() as stack:
        pipeline = stack.enter_context(contextlib.closing(RawPipeline("embedding", installed.path)))
        tuned = pipeline.run(texts=texts, tune=True)
        print(f"raw AsyncInferQueue, texts/s by streams x batch: {tuned['rates']}; best {tuned['best']}\n")
        _, bare = stack.enter_context(bare_server.running(installed.path))
        http = await stack.enter_async_context(load.session())
        process = await stack.enter_async_context(engine.running(installed))
        rows = [encoding.ids for encoding in raw.text_tokenizer(installed.path).encode_batch_fast(texts)]
        contenders = _Contenders(texts, rows, pipeline, process, http, node.url, bare)
        rounds = 2 if quick else 5
        many = await in_turn("Embeddings against raw OpenVINO, same texts", "texts/s", contenders.many(), rounds)
        title = "Embeddings of one caller against raw OpenVINO, one text after another"
        return to_json([*many, *await in_turn(title, "texts/s", contenders.alone(), rounds)])


AT_ONCE = (1, 2, 4)
_BUCKETS = (16, 32, 64, 128)


async def on_npu(_node, store, quick):
    """Texts/s of the emulated NPU with one run at a time and with several; return the figures.

    Raises AssertionError unless all give the same vectors to the last bit, or if a sum of busy times is more than the
    device's.
    """
    installed = store.get("all-minilm-l6-v2")
    texts = workload.texts(64 if quick else 128)
    encodings = raw.text_tokenizer(installed.path).encode_batch_fast(texts)
    jobs = [[encoding.ids[: _BUCKETS[-1]]] for encoding in encodings]
    expected = {}
    async with contextlib.AsyncExitStack() as stack:
        contenders = []
        for number in AT_ONCE:
            counter = stack.enter_context(stand_in_counter())
            options = {"npu_buckets": _BUCKETS, "infer_requests": number}
            process = await stack.enter_async_context(engine.embedding_on_npu(installed, counter, **options))
            measure = partial(_checked, process, jobs, counter, expected)
            contenders.append(Contender(f"{number} at once", measure))
        title = "Embeddings on the emulated NPU by the runs that it is given at once, 32 callers of one text"
        return to_json(await in_turn(title, "texts/s", contenders, 2 if quick else 5))


async def _checked(process, jobs, counter, expected):
    before, busy = int(counter.read_text()), []

    def check(number, result):
        busy.append(result.busy.us)
        assert result.data == expected.setdefault(number, result.data), "a vector differs"

    rate = await engine.embed(process, jobs, 32, check)
    assert min(busy) > 0, "a text is not proven"
    assert sum(busy) <= int(counter.read_text()) - before, "more busy time is claimed than there was"
    return rate


@dataclass
class _Contenders:
    """Who embeds the texts, or their rows of token ids. `url` is the node's, `bare` that of aiohttp alone."""

    texts: list[str]
    rows: list[list[int]]
    pipeline: RawPipeline
    process: Any
    http: Any
    url: str
    bare: str

    def many(self):
        """Many texts, against raw OpenVINO at its best for them."""
        return [
            Contender("raw AsyncInferQueue at its best", self._raw),
            Contender("engine process, 1 text a job, 32 at once", lambda: self._jobs(1, 32)),
            Contender("HTTP, 1 text a request, 32 callers", lambda: self._one_by_one(self.url, 32), target=0.85),
            Contender(f"engine process, {BATCH} texts a job", lambda: self._jobs(BATCH, 1)),
            Contender(f"HTTP, {BATCH} texts a request, 1 caller", lambda: self._batches(1), target=0.92),
            Contender(f"HTTP, {BATCH} texts a request, 2 callers", lambda: self._batches(2), target=0.92),
        ]

    def alone(self):
        """One text after another."""
        return [
            Contender("raw inference, one text at a time", lambda: self._raw(alone=True)),
            Contender("aiohttp alone around raw inference, 1 caller", lambda: self._one_by_one(self.bare, 1)),
            Contender("engine process, 1 text a job, 1 at once", lambda: self._jobs(1, 1)),
            Contender("HTTP, 1 text a request, 1 caller", lambda: self._one_by_one(self.url, 1), target=0.92),
        ]

    async def _raw(self, **how):
        return self.pipeline.run(texts=self.texts, **how)["per_second"]

    async def _jobs(self, size, at_once):
        jobs = [self.rows[start : start + size] for start in range(0, len(self.rows), size)]
        return await engine.embed(self.process, jobs, at_once)

    async def _one_by_one(self, url, callers):
        return await load.embed_one_by_one(self.http, url, self.texts, callers)

    async def _batches(self, callers):
        return await load.embed_in_batches(self.http, self.url, self.texts, BATCH, callers)
