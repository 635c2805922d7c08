"""A running node pulls from a hub, with the stock Ollama client: progress, errors, and a stop in the middle."""

import asyncio
import json
import signal

import aiohttp
import pytest

from tests.support.later import Later
from tests.support.nodes import start_node
from tests.support.scripted_hub import Repository, ScriptedHub
from tests.support.tiny_encoder import write_encoder

ollama = Later("ollama")

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture
def hub(tmp_path):
    write_encoder(tmp_path / "tiny")
    files = {
        str(path.relative_to(tmp_path / "tiny")): path.read_bytes()
        for path in (tmp_path / "tiny").rglob("*")
        if path.is_file()
    }
    with ScriptedHub({"maker/tiny": Repository(files), "maker/gated": Repository(files, gated=True)}) as hub:
        yield hub


@pytest.fixture
def node(hub, tmp_path):
    environment = {
        "NPU_NODE_MODELS": "[]",
        "NPU_NODE_MODEL_STORE": str(tmp_path / "store"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "",
    }
    with start_node(**environment) as node:
        yield node


@pytest.fixture
def client(node):
    client = ollama.Client(host=node.url)
    yield client
    client._client.close()


# A node is started and an encoder converted and loaded: about 10 s.
def test_pull_load_answer_and_remove_with_the_stock_client(client):
    states = list(client.pull("hf.co/maker/tiny", stream=True))
    assert states[0].status == "pulling manifest"
    assert states[-1].status == "success"
    assert any(state.status == "downloading model.safetensors" and state.total for state in states)
    assert [model.model for model in client.list().models] == ["tiny:latest"]
    assert len(client.embed(model="hf.co/maker/tiny", input="a cat").embeddings[0]) == 32
    client.delete("tiny")
    assert client.list().models == []
    with pytest.raises(ollama.ResponseError, match=r"maker/gated.*401.*HF_TOKEN"):
        list(client.pull("maker/gated", stream=True))
    with pytest.raises(ollama.ResponseError, match="maker/none"):
        client.pull("maker/none")
    with pytest.raises(ollama.ResponseError, match="absolute path") as refused:
        client.pull("./tiny")
    assert refused.value.status_code == 400


def test_a_stop_does_not_wait_for_a_download_that_stalls(hub, node):
    hub.stalls.add("model.safetensors")

    async def pull():
        async with (
            aiohttp.ClientSession() as http,
            http.post(node.url + "/api/pull", json={"model": "maker/tiny"}) as reply,
        ):
            first = json.loads(await reply.content.readline())
            assert await asyncio.to_thread(hub.stalled.wait, 60)
            node.process.send_signal(signal.SIGTERM)
            rest = await reply.content.read()
            return first, rest, await asyncio.to_thread(node.process.wait, 10)

    first, rest, status = asyncio.run(pull())
    assert first == {"status": "pulling manifest"}
    assert "shutting down" in rest.decode()
    assert status == 0
