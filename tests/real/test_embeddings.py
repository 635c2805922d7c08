"""The node's vectors are those of another library (sentence-transformers, torch, float32), text for text."""

import os
import random
import signal
import time
from contextlib import asynccontextmanager

import httpx2
import numpy as np
import pytest

from tests.real.inference import REFERENCE, VECTORS, worst_cosine
from tests.support.nodes import start_node
from tests.support.published import install
from tests.support.task_engine import vectors_of
from tests.support.tiny_encoder import WORDS, write_encoder
from worker_node.core.types import Device
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.supervisor import Engine
from worker_node.models.store import ModelStore
from worker_node.serving.row_tokenizer import RowTokenizer

RUNNER = "worker_node.encoders.dynamic:DynamicEncoder"

pytestmark = pytest.mark.real

TEXTS = REFERENCE["texts"]
MIN_COSINE = 0.9999


@pytest.fixture(scope="module")
def minilm(store):
    return store.get("all-minilm-l6-v2")


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return RowTokenizer(minilm.path, minilm.context_limit)


@asynccontextmanager
async def engine_with(minilm, **options):
    async def no_canary(_engine):
        pass

    spec = EngineSpec(minilm.id, minilm.kind, str(minilm.path), Device.CPU, RUNNER, options)
    engine = Engine(spec, no_canary, EngineLimits())
    engine.wake()
    try:
        assert (await engine.settled()).state is EngineState.READY
        yield engine
    finally:
        await engine.stop()


async def test_token_counts_are_those_of_the_other_library(tokenizer):
    rows = await tokenizer.encode(TEXTS, truncate=True)
    assert [len(row) for row in rows] == REFERENCE["tokens"]


def bf16_is_native():
    import openvino as ov

    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


async def check_alone_and_in_batches(engine, rows, chosen, sizes):
    far = time.monotonic() + 600
    alone = np.vstack([await vectors_of(engine, [rows[i]], deadline=far) for i in chosen])
    assert worst_cosine(alone, VECTORS[chosen]) >= MIN_COSINE
    assert np.allclose(np.linalg.norm(alone, axis=1), 1.0, atol=5e-3)
    shuffle = random.Random(7)
    for size in sizes:
        order = shuffle.sample(chosen, len(chosen))
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            output = await vectors_of(engine, [rows[i] for i in batch], deadline=far)
            assert worst_cosine(output, VECTORS[batch]) >= MIN_COSINE


async def test_vectors_equal_the_reference_alone_and_in_any_batch(minilm, tokenizer, long):
    rows = await tokenizer.encode(TEXTS, truncate=True)
    async with engine_with(minilm, precision="f32") as engine:
        await check_alone_and_in_batches(
            engine, rows, list(range(len(rows))), sizes=(2, 5, len(rows)) if long else (5,)
        )


async def test_vectors_equal_the_reference_with_the_bf16_hint(minilm, tokenizer):
    rows = await tokenizer.encode(TEXTS, truncate=True)
    # A CPU without bf16 instructions emulates them a hundred times slower (8 s for 256 tokens): there, only some
    # texts, chosen for their scripts and lengths, the empty one among them.
    chosen = list(range(len(rows))) if bf16_is_native() else [0, 1, 7, 8, 10, 13, 19]
    async with engine_with(minilm, precision="bf16") as engine:
        await check_alone_and_in_batches(engine, rows, chosen, sizes=(len(chosen),))


async def test_over_http_as_json_and_as_binary(node, http):
    body = {"texts": TEXTS, "truncate": True}
    async with http.post(node.url + "/embeddings", json=body) as reply:
        assert reply.status == 200
        assert reply.headers["X-NPU-Node-Device"] == "CPU"
        data = await reply.json()
    assert data["usage"]["prompt_tokens"] == sum(REFERENCE["tokens"])
    assert data["dimensions"] == 384
    as_json = np.asarray(data["embeddings"], np.float32)
    headers = {"Accept": "application/octet-stream"}
    async with http.post(node.url + "/embeddings", json=body, headers=headers) as reply:
        assert reply.headers["X-Shape"] == f"{len(TEXTS)},384"
        assert reply.headers["X-Space"] == data["space"]
        as_bytes = np.frombuffer(await reply.read(), "<f4").reshape(len(TEXTS), 384)
    assert worst_cosine(as_json) >= MIN_COSINE
    assert worst_cosine(as_bytes) >= MIN_COSINE
    assert worst_cosine(as_json, as_bytes) >= 0.999999


async def test_a_text_embedded_again_comes_from_the_cache_and_says_so(node, http):
    async def embed(*texts):
        async with http.post(node.url + "/embeddings", json={"texts": texts}) as reply:
            assert reply.status == 200
            return reply.headers.get("X-NPU-Node-Cache"), (await reply.json())

    told, first = await embed("never seen before 7f3a")
    assert told is None
    told, again = await embed("never seen before 7f3a")
    assert told == "hit"
    assert again["embeddings"] == first["embeddings"]
    assert again["npu_busy_delta_us"] is None
    told, mixed = await embed("nor this 91c2", "never seen before 7f3a")
    assert told == "partial"
    assert mixed["embeddings"][1] == first["embeddings"][0]
    assert mixed["embeddings"][0] != mixed["embeddings"][1]


def replace_weights(path, row):
    """Turn one token's vector round, which no known answer asks for, in a new file of the same size."""
    content, old = path.read_bytes(), row.tobytes()
    assert content.count(old) == 1
    path.with_suffix(".new").write_bytes(content.replace(old, (row * -5).tobytes()))
    path.with_suffix(".new").replace(path)


# A node with a tiny encoder, which is read and loaded twice.
def test_replaced_weights_are_another_space_once_an_engine_has_loaded_them(tmp_path):
    tensors = write_encoder(tmp_path / "tiny")
    made = install(ModelStore(tmp_path / "store"), tmp_path / "tiny")
    with start_node(NPU_NODE_MODELS='[{"name": "tiny"}]', NPU_NODE_MODEL_STORE=str(tmp_path / "store")) as node:

        def embed(text):
            reply = httpx2.post(f"{node.url}/embeddings", json={"model": "tiny", "texts": [text]}, timeout=120)
            if reply.status_code == 503:
                return None
            return reply.headers["X-Space"], np.asarray(reply.json()["embeddings"][0])

        space, before = embed("7")
        assert space == made.space
        replace_weights(
            made.path / "openvino_model.bin", tensors["embeddings.word_embeddings.weight"][WORDS.index("7")]
        )
        (pid,) = node.engine_processes()
        os.kill(pid, signal.SIGKILL)
        # Until the end of the engine was seen the old model answers, from its cache.
        while (found := embed("7")) is None or found[0] == space:
            assert found is None or found[1] == pytest.approx(before)
        assert found[1] != pytest.approx(before, abs=0.01), "the cached vector is not used"
    assert ModelStore(tmp_path / "store").get("tiny").space == found[0]
