"""Embeddings: raw AsyncInferQueue against the node over HTTP, with 1 and 32 callers and in batches of 64."""

from benchmarks import load, workload
from benchmarks.harness import Contender, RawPipeline, in_turn, to_json


async def run(node, store, quick):
    """Measure and print; return the figures."""
    texts = workload.texts(128 if quick else 512)
    raw = RawPipeline("embedding", store.get("all-minilm-l6-v2").path)
    try:
        tuned = raw.run(texts=texts, tune=True)
        print(f"raw AsyncInferQueue, texts/s by streams x batch: {tuned['rates']}; best {tuned['best']}\n")

        async def baseline():
            return raw.run(texts=texts)["per_second"]

        async with load.session() as http:

            async def callers(count):
                return await load.embed_one_by_one(http, node.url, texts, count)

            async def batches():
                return await load.embed_in_batches(http, node.url, texts, 64)

            return to_json(
                await in_turn(
                    "Embeddings over HTTP against raw OpenVINO, same texts",
                    "texts/s",
                    [
                        Contender("raw AsyncInferQueue at its best", baseline),
                        Contender("HTTP, 1 text a request, 32 callers", lambda: callers(32), target=0.85),
                        Contender("HTTP, 64 texts a request, 1 caller", batches, target=0.92),
                        Contender("HTTP, 1 text a request, 1 caller", lambda: callers(1)),
                    ],
                    rounds=2 if quick else 5,
                )
            )
    finally:
        raw.close()
