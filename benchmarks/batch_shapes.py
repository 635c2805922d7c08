"""`python -m benchmarks.batch_shapes [--rounds N]`: whether this machine would gain from other batches.

Engine processes of the embedding model on the CPU, each with other streams, tokens of a batch or rounding of lengths,
in turn with one that has the defaults: 32 callers of one text, and one and two callers of 64. All of these can be set
in node.toml.
"""

import argparse
import asyncio
import contextlib
import os

from benchmarks import engine, raw, workload
from benchmarks.harness import GUARD, Contender, in_turn
from benchmarks.quiet import describe_machine
from worker_node.models.store import ModelStore

FORMS = (
    {},
    {"streams": 1},
    {"streams": 0},
    {"streams": len(os.sched_getaffinity(0))},
    {"streams": 1, "max_batch_tokens": 1024},
    {"max_batch_tokens": 256},
    {"max_batch_tokens": 1024},
    {"length_multiple": 1},
    {"length_multiple": 8},
    {"length_multiple": 32},
)
CASES = ((32, 1), (1, 64), (2, 64))


async def compare(rounds, texts):
    """Print each form's texts per second beside those of the first, for each case."""
    installed = ModelStore().get("all-minilm-l6-v2")
    tokenizer = raw.text_tokenizer(installed.path)
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(workload.texts(texts))]
    async with contextlib.AsyncExitStack() as stack:
        forms = [
            (", ".join(f"{name} {value}" for name, value in form.items()) or "the node's defaults", running)
            for form in FORMS
            for running in [await stack.enter_async_context(engine.running(installed, **form))]
        ]
        for callers, size in CASES:
            jobs = [rows[start : start + size] for start in range(0, len(rows), size)]
            contenders = [
                Contender(name, lambda running=running: engine.embed(running, jobs, callers))  # noqa: B023
                for name, running in forms
            ]
            await in_turn(f"{callers} callers of {size} texts", "texts/s", contenders, rounds)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_shapes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=256)
    options = parser.parse_args()
    print(", ".join(f"{name}: {value}" for name, value in describe_machine().items()), flush=True)
    asyncio.run(compare(options.rounds, options.texts))
    print(GUARD.line())


if __name__ == "__main__":
    main()
