"""What /health tells to whom: all of it to key holders, status and version to everybody else."""

import pytest

from tests.support.application import application, built_models
from worker_node.settings import NodeSettings

PRIVATE = {"devices", "models", "npu", "uptime_s"}


async def told(keys, headers, *, draining=False):
    """The status and the fields of /health."""
    async with application(settings=NodeSettings(api_keys=keys)) as (client, node):
        node.state.draining = draining
        async with client.get("/health", headers=headers) as reply:
            return reply.status, set(await reply.json())


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic one", "one", "Bearer"])
@pytest.mark.parametrize(("draining", "status"), [(False, 200), (True, 503)])
async def test_without_a_key_only_the_status_and_the_version_are_told(header, draining, status):
    headers = {} if header is None else {"Authorization": header}
    assert await told(("one", "two"), headers, draining=draining) == (status, {"status", "version"})


@pytest.mark.parametrize(("keys", "headers"), [((), {}), (("one", "two"), {"Authorization": "Bearer two"})])
async def test_key_holders_and_callers_of_a_node_without_keys_are_told_all(keys, headers):
    status, fields = await told(keys, headers)
    assert status == 200
    assert fields >= PRIVATE


async def test_what_was_set_for_an_engine_is_told(store):
    """Only that: the rest are defaults, and what the node completes itself."""
    models = built_models(store, "smollm2-135m-instruct", prompt_lookup=True, kv_cache_precision="u8")
    async with application(models) as (client, _):
        for path in ("/health", "/dashboard/state"):
            async with client.get(path) as reply:
                [engine] = (await reply.json())["models"][0]["engines"]
                assert engine["options"] == {"prompt_lookup": True, "kv_cache_precision": "u8"}


@pytest.mark.parametrize(("path", "field"), [("/embeddings", dict), ("/v1/embeddings", dict), ("/api/embed", str)])
async def test_an_expectation_that_is_not_met_is_refused_in_the_format_of_the_path(path, field):
    async with application() as (client, _):
        for expected, status in (("200-ok", 400), ("100-continue", 400), ("100-Continue", 400)):
            async with client.post(path, data=b"{", headers={"Expect": expected}) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, type(error)) == (status, field)
                assert ("Expect must be" in str(error)) == (expected == "200-ok")
