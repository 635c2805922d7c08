"""Settings that were reloaded hold from the next request on, over HTTP."""

from tests.support.application import application
from worker_node.settings import NodeSettings


async def test_keys_are_replaced_from_one_request_to_the_next():
    async with application(settings=NodeSettings(api_keys=("old",))) as (client, node):

        async def status(key):
            async with client.get("/models", headers={"Authorization": f"Bearer {key}"}) as reply:
                return reply.status

        assert (await status("old"), await status("new")) == (200, 401)
        node.adopt(NodeSettings(api_keys=("new",)))
        assert (await status("old"), await status("new")) == (401, 200)


async def test_host_names_pages_and_limits_are_those_of_the_new_settings():
    async with application() as (client, node):

        async def status(**headers):
            async with client.get("/models", headers=headers) as reply:
                return reply.status, reply.headers.get("Access-Control-Allow-Origin")

        page = {"Origin": "https://app.example"}
        assert await status(Host="npu.example") == (403, None)
        assert await status(**page) == (403, None)
        changed = NodeSettings(allowed_hosts=("npu.example",), cors_origins=("https://app.example",), max_body_bytes=10)
        node.adopt(changed)
        assert await status(Host="npu.example") == (200, None)
        assert await status(**page) == (200, "https://app.example")
        async with client.post("/inference", json={"prompt": "more than ten bytes"}) as reply:
            assert reply.status == 413
