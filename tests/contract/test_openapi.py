"""/openapi.json is sound, describes every route, and holds for whatever is sent."""

import jsonschema_rs
import pytest

from docs.http_reference import PAGE, page
from worker_node.app import operations
from worker_node.http import routes


def test_every_schema_is_a_schema():
    document = routes.document(operations())
    for name in document["components"]["schemas"]:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema_rs.validator_for(schema)


def test_the_names_of_schemas_do_not_tell_where_their_classes_stand():
    names = routes.document(operations())["components"]["schemas"]
    assert [name for name in names if "__" in name] == []


def test_the_reference_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run make docs"


@pytest.mark.real
async def test_the_node_serves_the_document(http, node):
    async with http.get(node.url + "/openapi.json") as reply:
        assert await reply.json() == routes.document(operations())
