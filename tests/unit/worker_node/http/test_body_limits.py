"""How large a body may be: larger where it may carry images, and only while a model reads them."""

from types import SimpleNamespace

import pytest

from worker_node.http.body import _most_bytes
from worker_node.settings import NodeSettings


def node(*images, **settings):
    models = [SimpleNamespace(images=each) for each in images] + [SimpleNamespace()]
    return SimpleNamespace(settings=NodeSettings(**settings), manager=SimpleNamespace(models=models))


@pytest.mark.parametrize(
    ("node", "images", "limit"),
    [
        (node(), True, 8 * 2**20),
        (node(None), True, 8 * 2**20),
        (node(None, "rules"), True, 32 * 2**20),
        (node(None, "rules"), False, 8 * 2**20),
        (node("rules", max_image_body_bytes=10, max_body_bytes=20), True, 20),
    ],
    ids=["no model", "a model without vision", "a model with vision", "another request", "the larger of both"],
)
def test_bodies_may_be_larger_where_images_are_read(node, images, limit):
    assert _most_bytes(node, images=images) == limit
