"""Repeated beginnings of prompts over HTTP: the time to the first token.

It is taken by the clock, and as CPU time of the engine, which other programs disturb little.

`run`: all prompts but those called new have the same first 600 of 601 tokens; new ones come between them, as other
callers' would. `conversations`: chats of five turns on two emulated NPUs, one of them without a prefix cache.
"""

import json
import random
import statistics
import time
from functools import partial

from benchmarks.edge_cpu import cpu_seconds
from benchmarks.harness import Contender, in_turn, to_json
from benchmarks.load import session
from benchmarks.node import start_node

MODEL = "smollm2-135m-instruct"
PREFIX_TOKENS = 600
OTHERS_BETWEEN = 3
# Of a chat: the instructions, and what each of its turns adds.
SYSTEM_TOKENS, TURN_TOKENS, TURNS = 300, 120, 5
ON_NPU = {"name": MODEL, "placements": ["NPU"], "max_prompt_len": 1024}


async def run(node, _store, quick):
    """Measure and print; return the figures."""
    pid = node.engine_pids()[MODEL]
    rng = random.Random(1)
    prefix = _tokens(rng, PREFIX_TOKENS)
    async with session() as http:
        ask = partial(_first_token, http, node.url)
        await ask(prefix + _tokens(rng, 1))

        async def measured(prompt, clock):
            before = clock()
            await ask(prompt)
            return (clock() - before) * 1e3

        async def new(clock):
            return await measured(_tokens(rng, PREFIX_TOKENS + 1), clock)

        async def repeated(clock):
            for _ in range(OTHERS_BETWEEN):
                await ask(_tokens(rng, PREFIX_TOKENS + 1))
            return await measured(prefix + _tokens(rng, 1), clock)

        figures = []
        clocks = {"Time": time.perf_counter, "CPU time of the engine": partial(cpu_seconds, pid)}
        for what, clock in clocks.items():
            contenders = [
                Contender("new prompts", partial(new, clock)),
                Contender("the first 600 tokens repeated", partial(repeated, clock)),
            ]
            figures += await in_turn(f"{what} to the first token", "ms", contenders, 3 if quick else 10)
            print(f"  faster by {figures[-2].median / figures[-1].median:.1f}   target ≥ 5\n", flush=True)
    return to_json(figures)


async def conversations(_node, _store, quick):
    """Measure and print; return the figures."""
    rng = random.Random(1)
    nodes = [
        start_node(
            "--log-level",
            "warning",
            NPU_NODE_NPU_EMULATION="1",
            NPU_NODE_MODELS=json.dumps([ON_NPU | {"enable_prefix_caching": caches}]),
        )
        for caches in (False, True)
    ]
    with nodes[0] as without, nodes[1] as caching:
        async with session() as http:
            cpu = {without.url: [], caching.url: []}

            async def later_turns(node):
                pid = node.engine_pids()[MODEL]
                prompt, times = _tokens(rng, SYSTEM_TOKENS), []
                for _ in range(TURNS):
                    prompt += _tokens(rng, TURN_TOKENS)
                    before, used = time.perf_counter(), cpu_seconds(pid)
                    await _first_token(http, node.url, prompt)
                    times.append((time.perf_counter() - before, cpu_seconds(pid) - used))
                seconds, used = (statistics.fmean(each) for each in zip(*times[1:], strict=True))
                cpu[node.url].append(used)
                return seconds * 1e3

            contenders = [
                Contender("turns 2 to 5 without a prefix cache", partial(later_turns, without)),
                Contender("turns 2 to 5", partial(later_turns, caching)),
            ]
            figures = await in_turn("Time to the first token", "ms", contenders, 2 if quick else 5)
    without, caching = (statistics.median(used) for used in cpu.values())
    print(f"  CPU time of the engine: {caching / without:.3f} of that without the cache\n", flush=True)
    return to_json(figures)


def _tokens(rng, count):
    """Token ids of which none begins or ends anything."""
    return [rng.randrange(1000, 20_000) for _ in range(count)]


async def _first_token(http, url, prompt):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    async with http.post(url + "/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert (await reply.json())["usage"]["prompt_tokens"] == len(prompt)
