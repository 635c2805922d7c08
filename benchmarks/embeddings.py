"""Embeddings: raw AsyncInferQueue, the engine process and the node over HTTP; 1 and 32 callers and batches of 64."""

import tokenizers

from benchmarks import engine, load, workload
from benchmarks.harness import Contender, RawPipeline, in_turn, to_json

BATCH = 64


async def run(node, store, quick):
    """Measure and print; return the figures."""
    texts = workload.texts(128 if quick else 256)
    installed = store.get("all-minilm-l6-v2")
    tokenizer = tokenizers.Tokenizer.from_file(str(installed.path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    raw = RawPipeline("embedding", installed.path)
    try:
        tuned = raw.run(texts=texts, tune=True)
        print(f"raw AsyncInferQueue, texts/s by streams x batch: {tuned['rates']}; best {tuned['best']}\n")
        async with load.session() as http, engine.running(installed) as process:

            async def baseline():
                return raw.run(texts=texts)["per_second"]

            async def engine_callers(count):
                return await engine.embed(process, [[row] for row in rows], count)

            async def engine_batches(callers):
                return await engine.embed(process, [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)], callers)

            async def http_callers(count):
                return await load.embed_one_by_one(http, node.url, texts, count)

            async def http_batches(callers):
                return await load.embed_in_batches(http, node.url, texts, BATCH, callers)

            async def one_by_one():
                return raw.run(texts=texts, alone=True)["per_second"]

            rounds = 2 if quick else 5
            many = await in_turn(
                "Embeddings against raw OpenVINO, same texts",
                "texts/s",
                [
                    Contender("raw AsyncInferQueue at its best", baseline),
                    Contender("engine process, 1 text a job, 32 at once", lambda: engine_callers(32)),
                    Contender("HTTP, 1 text a request, 32 callers", lambda: http_callers(32), target=0.85),
                    Contender(f"engine process, {BATCH} texts a job", lambda: engine_batches(1)),
                    Contender(f"HTTP, {BATCH} texts a request, 1 caller", lambda: http_batches(1), target=0.92),
                    Contender(f"HTTP, {BATCH} texts a request, 2 callers", lambda: http_batches(2), target=0.92),
                ],
                rounds=rounds,
            )
            alone = await in_turn(
                "Embeddings of one caller against raw OpenVINO, one text after another",
                "texts/s",
                [
                    Contender("raw inference, one text at a time", one_by_one),
                    Contender("engine process, 1 text a job, 1 at once", lambda: engine_callers(1)),
                    Contender("HTTP, 1 text a request, 1 caller", lambda: http_callers(1), target=0.92),
                ],
                rounds=rounds,
            )
            return to_json([*many, *alone])
    finally:
        raw.close()
