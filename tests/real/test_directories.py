"""Directories of other tools are served where they are: their vectors and texts are those of other libraries."""

from pathlib import Path

import numpy as np
import openvino_genai as genai
import pytest

from tests.real.directories import exported_minilm, exported_smollm, published_minilm
from tests.real.inference import REFERENCE, worst_cosine
from tests.support.nodes import start_node
from worker_node.models.store import ModelStore

pytestmark = pytest.mark.real

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def state(directory):
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in [directory, *directory.rglob("*")]}


@pytest.fixture(scope="module")
def served(store, quick_models, tmp_path_factory):
    room = tmp_path_factory.mktemp("directories")
    published = published_minilm()
    directories = {
        "published": published,
        "exported": exported_minilm(store, published, room / "exported"),
        "Chat": exported_smollm(ModelStore(Path(quick_models["NPU_NODE_MODEL_STORE"])), room / "Chat"),
    }
    before = {directory: state(directory) for directory in directories.values()}
    config = room / "node.toml"
    config.write_text(
        f"""
compile_cache = "{room / "compiled"}"
[[models]]
name = "published"
path = "{published}"
placements = ["CPU"]
[[models]]
path = "exported"   # relative to this file
pooling = "mean"
placements = ["CPU"]
[[models]]
path = "{directories["Chat"]}"
placements = ["CPU"]
"""
    )
    with start_node("--config", str(config)) as node:
        yield node, directories
    assert {directory: state(directory) for directory in directories.values()} == before


# Starts the node, which builds two encoders and loads three models.
@pytest.mark.parametrize("model", ["published", "exported"])
async def test_the_vectors_of_an_encoder_are_those_of_sentence_transformers(served, http, model):
    node, _ = served
    body = {"texts": REFERENCE["texts"], "model": model, "truncate": True}
    async with http.post(node.url + "/embeddings", json=body) as reply:
        assert reply.status == 200, await reply.text()
        vectors = np.asarray((await reply.json())["embeddings"])
    assert worst_cosine(vectors) >= 0.9999


async def test_the_text_of_a_generation_model_is_that_of_its_own_library(served, http):
    node, directories = served
    body = {"model": "chat", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
        answered = await reply.json()
    pipeline = genai.LLMPipeline(directories["Chat"], "CPU")
    expected = pipeline.generate([QUESTION[0]["content"]], max_new_tokens=8, do_sample=False).texts[0]
    assert answered["choices"][0]["message"]["content"] == expected
