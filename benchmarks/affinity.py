"""Affinity of conversations on two nodes: the first token of turns 2 to 5, with it and without it.

It is taken by the clock, and as CPU time of the engines, which other programs disturb little: of the whole turn.

The nodes run SmolLM2 on the CPU, then on the emulated NPU. What is saved is the prefix that the node has in its cache,
so without a prefix cache on the device both are alike.
"""

import itertools
import json
import random
import time
from contextlib import ExitStack
from functools import partial

from backend_client import ClientOptions, NPUClient
from benchmarks.edge_cpu import cpu_seconds
from benchmarks.harness import Contender, Figure, in_turn, show, to_json
from benchmarks.node import start_node

MODEL = "smollm2-135m-instruct"
TURNS = 5
SYSTEM_WORDS, WORDS = 280, 40
NOUNS = "river harbour engine letter winter orchard signal mirror garden window market bridge".split()
SHAPES = {"max_prompt_len": 1024, "min_response_len": 64}


class Conversations:
    """New conversations over two nodes, each of five turns and with a system prompt of its own."""

    def __init__(self, nodes, *, affinity, seed):
        self._client = NPUClient([node.url for node in nodes], options=ClientOptions(affinity=affinity))
        self._engines = [pid for node in nodes for pid in node.engine_pids().values()]
        self._rng = random.Random(seed)
        self.kept = []

    async def later_turn(self, *, by_clock):
        """Milliseconds to the first token of a later turn, or of CPU time for it: the mean of one conversation."""
        messages = [{"role": "system", "content": self._text(SYSTEM_WORDS)}]
        taken, nodes = [], []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": self._text(WORDS)})
            began, first, spent = time.perf_counter(), None, self._spent()
            async with self._client.stream_chat(messages, model=MODEL, max_tokens=8, temperature=0) as stream:
                async for _ in stream:
                    first = first or time.perf_counter() - began
            taken.append((first if by_clock else self._spent() - spent) * 1e3)
            nodes.append(stream.result.node)
            messages.append({"role": "assistant", "content": stream.result.text})
        self.kept += [float(one == other) for one, other in itertools.pairwise(nodes)]
        return sum(taken[1:]) / (TURNS - 1)

    def _spent(self):
        return sum(map(cpu_seconds, self._engines))

    def _text(self, words):
        return " ".join(self._rng.choices(NOUNS, k=words))

    async def close(self):
        await self._client.close()


async def run(_node, _store, quick):
    """Measure and print; return the figures."""
    figures = []
    for device in ("CPU", "NPU"):
        with ExitStack() as running:
            model = {"name": MODEL, "placements": [device]} | (SHAPES if device == "NPU" else {})
            given = {"NPU_NODE_MODELS": json.dumps([model]), "NPU_NODE_NPU_EMULATION": "1"}
            nodes = [running.enter_context(start_node("--log-level", "warning", **given)) for _ in range(2)]
            figures += await _compared(device, nodes, 3 if quick else 10)
    return to_json(figures)


async def _compared(device, nodes, rounds):
    """With affinity against without it, on two nodes."""
    without, with_it = (Conversations(nodes, affinity=affinity, seed=affinity) for affinity in (False, True))
    found = []
    for what, by_clock in (("Time to the first token", True), ("CPU time of the engines", False)):
        contenders = [
            Contender("any node", partial(without.later_turn, by_clock=by_clock)),
            Contender("the node of the conversation", partial(with_it.later_turn, by_clock=by_clock)),
        ]
        found += await in_turn(f"{what}, turns 2 to {TURNS}, two nodes, {device}", "ms", contenders, rounds)
    kept = [
        Figure(f"later turns on the same node, {way.name}", "", [sum(talks.kept) / len(talks.kept)])
        for way, talks in zip(contenders, (without, with_it), strict=True)
    ]
    show("Of them", kept)
    for talks in (without, with_it):
        await talks.close()
    return found + kept
