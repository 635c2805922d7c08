"""Repeated beginnings of prompts over HTTP: the engine's CPU time to the first token of 601 prompt tokens.

All prompts but those called new begin with the same 600 tokens; new ones come between them, as other callers' would.
"""

import random
from functools import partial

from benchmarks.edge_cpu import cpu_seconds
from benchmarks.harness import Contender, in_turn, to_json
from benchmarks.load import session

MODEL = "smollm2-135m-instruct"
PREFIX_TOKENS = 600
OTHERS_BETWEEN = 3


async def run(node, _store, quick):
    """Measure and print; return the figures."""
    pid = node.engine_pids()[MODEL]
    rng = random.Random(1)
    prefix = _tokens(rng, PREFIX_TOKENS)
    async with session() as http:
        ask = partial(_first_token, http, node.url)
        await ask(prefix + _tokens(rng, 1))

        async def engine_ms(prompt):
            before = cpu_seconds(pid)
            await ask(prompt)
            return (cpu_seconds(pid) - before) * 1e3

        async def new():
            return await engine_ms(_tokens(rng, PREFIX_TOKENS + 1))

        async def repeated():
            for _ in range(OTHERS_BETWEEN):
                await ask(_tokens(rng, PREFIX_TOKENS + 1))
            return await engine_ms(prefix + _tokens(rng, 1))

        contenders = [Contender("new prompts", new), Contender("the first 600 tokens repeated", repeated)]
        figures = await in_turn("CPU time of the engine to the first token", "ms", contenders, 3 if quick else 10)
    print(f"  faster by {figures[0].median / figures[1].median:.1f}   target ≥ 5\n", flush=True)
    return to_json(figures)


def _tokens(rng, count):
    """Token ids of which none begins or ends anything."""
    return [rng.randrange(1000, 20_000) for _ in range(count)]


async def _first_token(http, url, prompt):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    async with http.post(url + "/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert (await reply.json())["usage"]["prompt_tokens"] == len(prompt)
