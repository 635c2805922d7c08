"""/openapi.json is sound, describes every route, and holds for whatever is sent."""

import jsonschema_rs
import pytest

from worker_node.http import admin, dashboard, explain, health, metrics, openapi, pages
from worker_node.http import models as model_pulls
from worker_node.http import models as node_models
from worker_node.http import ollama as ollama_models
from worker_node.http import openai as openai_models
from worker_node.http.task import task_apis

ROOMS = [
    pages,
    explain,
    health,
    metrics,
    dashboard,
    openapi,
    admin,
    model_pulls,
    node_models,
    openai_models,
    ollama_models,
]


def test_every_route_is_described():
    served = {
        (route.method.lower(), route.path.replace("{id:.+}", "{id}"))
        for room in (*ROOMS, *task_apis())
        for route in room.routes()
    }
    assert served == {(operation.method, operation.path) for operation in openapi.operations()}


def test_every_schema_is_a_schema():
    document = openapi.document()
    for name in document["components"]["schemas"]:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema_rs.validator_for(schema)


def test_the_names_of_schemas_do_not_tell_where_their_classes_stand():
    names = openapi.document()["components"]["schemas"]
    assert [name for name in names if "__" in name] == []


@pytest.mark.real
async def test_the_node_serves_the_document(http, node):
    async with http.get(node.url + "/openapi.json") as reply:
        assert await reply.json() == openapi.document()
