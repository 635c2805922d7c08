"""Generation: raw pipelines against the node over HTTP, streaming, greedy, 64 new tokens."""

from benchmarks import load, workload
from benchmarks.harness import Contender, Figure, RawPipeline, in_turn, show, to_json

TOKENS = 64


async def run(node, store, quick):
    """Measure and print; return the figures."""
    path = store.get("smollm2-135m-instruct").path
    figures = []
    for callers, length in ((16, 60), (8, 60), (1, 60)) if quick else ((16, 60), (8, 60), (1, 60), (8, 600), (1, 600)):
        raw = RawPipeline("continuous" if callers > 1 else "stateful", path)
        try:
            figures += await _compare(node, raw, callers, length, rounds=2 if quick else 5)
        finally:
            raw.close()
    return to_json(figures)


async def _compare(node, raw, callers, length, rounds):
    count = callers if callers > 1 else 4
    seeds = iter(range(10_000))
    firsts = {"raw": [], "http": []}

    async def baseline():
        prompts = workload.prompts(count, length, seed=next(seeds))
        result = raw.run(prompts=prompts, tokens=TOKENS)
        firsts["raw"].append(result["first_token_s"] * 1e3)
        return result["per_second"]

    async with load.session() as http:

        async def over_http():
            prompts = workload.prompts(count, length, seed=next(seeds))
            rate, first = await load.generate_all(http, node.url, prompts, TOKENS, callers)
            firsts["http"].append(first * 1e3)
            return rate

        figures = await in_turn(
            f"Generation, {callers} callers, prompts of {length} tokens, {TOKENS} new tokens, streamed",
            "tokens/s",
            [
                Contender("raw " + ("ContinuousBatchingPipeline loop" if callers > 1 else "LLMPipeline"), baseline),
                Contender("HTTP", over_http, target={16: 0.92, 1: 0.95}.get(callers) if length == 60 else None),
            ],
            rounds=rounds,
        )
    if callers == 1:
        added = [http - raw for http, raw in zip(firsts["http"][1:], firsts["raw"][1:], strict=True)]
        first = [
            Figure("time to first token, raw", "ms", firsts["raw"][1:]),
            Figure("time to first token, HTTP", "ms", firsts["http"][1:]),
            Figure("added (wanted: at most 3 ms at the median)", "ms", added),
        ]
        show("", first)
        figures += first
    return figures
