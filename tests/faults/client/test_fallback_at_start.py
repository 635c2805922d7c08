"""A service that starts while its nodes are down, or have lost their embedding model: what the cloud may answer."""

import asyncio

import pytest

from backend_client import ClientOptions, CloudClient, CloudSettings, InferenceClient, NPUClient, NPUUnavailableError
from backend_client.errors import NotOffered, VectorSpaceMismatch
from backend_client.options import ProbeOptions
from backend_client.testing.node import model_row
from tests.faults.scripted_node import EMBEDDER, WRITER, ScriptedNode, answering, error_response
from tests.support.ports import free_port

OFTEN = ClientOptions(probe=ProbeOptions(interval=0.05))
ONE, TWO = {"space-a": "cloud-minilm"}, {"space-a": "cloud-minilm", "space-b": "cloud-e5"}


def starting(url, cloud, mapped=ONE, **more):
    settings = CloudSettings(base_url=cloud.url, api_key="sk-cloud", embedding_models=mapped)
    return InferenceClient(
        NPUClient([url], options=OFTEN, spaces=more.pop("spaces", None)), CloudClient(settings), **more
    )


@pytest.fixture
def port():
    return free_port()


async def until_served(client):
    while not client.npu.healthz().serving:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("model", [None, EMBEDDER])
async def test_the_only_mapped_space_is_used_and_bound(port, cloud, model):
    async with starting(f"http://127.0.0.1:{port}", cloud) as client:
        first = await client.embed_result("text", model=model)
        assert (first.source, first.space) == ("cloud", "space-a")
        async with ScriptedNode(space="space-a").running(port=port):
            await until_served(client)
            assert (await client.embed_result("text", model=model)).source == "node"
            assert client.npu.spaces == {EMBEDDER: "space-a"}


@pytest.mark.parametrize("model", [None, EMBEDDER])
async def test_nodes_in_another_space_do_not_answer_afterwards(port, cloud, model):
    async with starting(f"http://127.0.0.1:{port}", cloud) as client:
        await client.embed("text", model=model)
        async with ScriptedNode(space="space-b").running(port=port) as node:
            await until_served(client)
            again = await client.embed_result("text", model=model)
            assert (again.source, again.space) == ("cloud", "space-a")
            with pytest.raises(VectorSpaceMismatch, match="space-b"):
                await client.embed("text", model=model, local_only=True)
            assert not node.requests


@pytest.mark.parametrize("model", [None, EMBEDDER])
async def test_an_answer_of_the_cloud_is_dropped_if_nodes_have_bound_the_model_meanwhile(port, cloud, model):
    async with starting(f"http://127.0.0.1:{port}", cloud) as client:

        async def node_comes_back(_):
            async with ScriptedNode(space="space-b").running(port=port):
                await until_served(client)
                assert (await client.embed_result("text", model=model)).space == "space-b"

        cloud.respond = node_comes_back
        with pytest.raises(VectorSpaceMismatch, match="nodes answer in space-b"):
            await client.embed("text", model=model)


async def test_nothing_is_assumed_once_a_node_has_reported_a_space(scripted, cloud):
    scripted.space = "space-b"
    async with starting(scripted.url, cloud) as client:
        with pytest.raises(NPUUnavailableError, match="no node has reported"):
            await client.embed("text", model="misspelt")

        scripted.respond = answering(lambda: error_response(503, "engine_unavailable", retry_after_ms=60_000))
        with pytest.raises(NPUUnavailableError, match="no cloud model is declared for the vector space space-b"):
            await client.embed("text")
    assert not cloud.requests


@pytest.mark.parametrize("kind", [None, "embedding"])
async def test_an_embedding_model_that_failed_is_unavailable_and_the_cloud_answers(scripted, cloud, kind):
    # Older nodes do not know the kind of a damaged model.
    scripted.models[EMBEDDER] = model_row(kind) | {"state": "failed", "placements": []}
    scripted.health_status = "degraded"
    async with starting(scripted.url, cloud) as client:
        with pytest.raises(NPUUnavailableError, match=f"{EMBEDDER} in the state failed") as caught:
            await client.npu.embed("text")
        assert not isinstance(caught.value, NotOffered)
        assert (await client.embed_result("text")).source == "cloud"
        assert (await client.generate("prompt", model=WRITER)).source == "node"


async def test_calls_without_a_model_stay_in_the_clouds_space_though_the_named_model_is_in_another(port, cloud):
    async with starting(f"http://127.0.0.1:{port}", cloud) as client:
        await client.embed("text")
        async with ScriptedNode(space="space-b").running(port=port):
            await until_served(client)
            assert (await client.embed_result("text", model=EMBEDDER)).space == "space-b"
            assert (await client.embed_result("text")).space == "space-a"
            with pytest.raises(VectorSpaceMismatch, match="nodes answer in space-b"):
                await client.embed("text", local_only=True)
