"""Keywords that cannot be enforced are dropped and listed, or refused by name where the schema is strict."""

import pytest

# Seven generations of up to 48 tokens under a grammar: some take more than 5 s where the machine has other work.
pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def objects(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


async def ask(http, node, schema, strict, stream=False):
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema} | strict}
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Answer in JSON."}],
        "response_format": form,
        "max_tokens": 48,
        "stream": stream,
    }
    async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
        return reply.status, reply.headers.get("X-NPU-Node-Ignored"), None if stream else await reply.json()


# A set of strings, as pydantic writes it.
UNENFORCED = objects(tags={"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True}, n=DIGIT)
PLACE = "response_format.json_schema.schema.properties.tags.uniqueItems"


@pytest.mark.parametrize(("strict", "stream"), [({}, False), ({"strict": False}, True)])
async def test_what_cannot_be_enforced_is_dropped_and_listed_where_the_schema_is_not_strict(http, node, strict, stream):
    status, ignored, _ = await ask(http, node, UNENFORCED, strict, stream)
    assert status == 200
    assert ignored == PLACE


async def test_what_cannot_be_enforced_is_rejected_by_name_where_the_schema_is_strict(http, node):
    status, _, reply = await ask(http, node, UNENFORCED, {"strict": True})
    assert status == 400
    assert reply["error"]["param"] == PLACE


async def test_a_schema_that_admits_nothing_is_a_bad_request_either_way(http, node):
    for strict in ({}, {"strict": True}):
        status, _, _ = await ask(http, node, objects(a=False), strict)
        assert status == 400
