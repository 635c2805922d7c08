"""Affinity of conversations on two nodes: the time to the first token of turns 2 to 5, with it and without it.

The nodes run SmolLM2 on the CPU, then on the emulated NPU. What is saved is the prefix that the node has in its cache,
so without a prefix cache on the device both are alike.
"""

import itertools
import json
import random
import time
from contextlib import ExitStack

from backend_client import ClientOptions, NPUClient
from benchmarks.harness import Contender, Figure, in_turn, show, to_json
from benchmarks.node import start_node

MODEL = "smollm2-135m-instruct"
TURNS = 5
SYSTEM_WORDS, WORDS = 280, 40
NOUNS = "river harbour engine letter winter orchard signal mirror garden window market bridge".split()
SHAPES = {"max_prompt_len": 1024, "min_response_len": 64}


class Conversations:
    """New conversations over two nodes, each of five turns and with a system prompt of its own."""

    def __init__(self, urls, *, affinity, seed):
        self._client = NPUClient(urls, options=ClientOptions(affinity=affinity))
        self._rng = random.Random(seed)
        self.kept = []

    async def first_token(self):
        """Milliseconds to the first token of a later turn, the mean of one conversation."""
        messages = [{"role": "system", "content": self._text(SYSTEM_WORDS)}]
        taken, nodes = [], []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": self._text(WORDS)})
            began, first = time.perf_counter(), None
            async with self._client.stream_chat(messages, model=MODEL, max_tokens=8, temperature=0) as stream:
                async for _ in stream:
                    first = first or time.perf_counter() - began
            taken.append(first * 1e3)
            nodes.append(stream.result.node)
            messages.append({"role": "assistant", "content": stream.result.text})
        self.kept += [float(one == other) for one, other in itertools.pairwise(nodes)]
        return sum(taken[1:]) / (TURNS - 1)

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
            urls = [running.enter_context(start_node("--log-level", "warning", **given)).url for _ in range(2)]
            figures += await _compared(device, urls, 3 if quick else 10)
    return to_json(figures)


async def _compared(device, urls, rounds):
    """With affinity against without it, on two nodes."""
    without, with_it = (Conversations(urls, affinity=affinity, seed=affinity) for affinity in (False, True))
    contenders = [
        Contender("any node", without.first_token),
        Contender("the node of the conversation", with_it.first_token),
    ]
    found = await in_turn(f"First token of turns 2 to {TURNS}, two nodes, {device}", "ms", contenders, rounds)
    kept = [
        Figure(f"later turns on the same node, {way.name}", "", [sum(talks.kept) / len(talks.kept)])
        for way, talks in zip(contenders, (without, with_it), strict=True)
    ]
    show("Of them", kept)
    for talks in (without, with_it):
        await talks.close()
    return found + kept
