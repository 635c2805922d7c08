"""Images in the requests of every dialect: where they stand in a conversation, and which are refused at once."""

import pytest

from tests.support.application import application, built_models
from worker_node.core.errors import BadRequest, PayloadTooLarge
from worker_node.tasks.generate.images import MAX_IMAGE_BYTES, image_of_base64, image_of_url

WRITER = "smollm2-135m-instruct"
URL = "data:image/png;base64,AAAA"


def chat(content):
    return {"model": WRITER, "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("HTTPS://example.org/a.png?signature=secret", "send the image inline as a data URL"),
        ("file:///etc/passwd", "not a data URL"),
        ("data:image/png,abc", "not a data URL"),
        ("data:image/svg+xml;base64,AAAA", "PNG, JPEG, WebP or GIF, not image/svg+xml"),
        ("data:image/png;base64,", "is empty"),
    ],
)
def test_urls_that_hold_no_image_are_refused_with_the_reason(url, told):
    with pytest.raises(BadRequest, match="here") as refusal:
        image_of_url(url, 0, "here")
    assert told in refusal.value.message
    assert "secret" not in refusal.value.message
    assert refusal.value.param == "here"


def test_an_image_over_the_bound_is_refused_undecoded_and_no_log_shows_one():
    with pytest.raises(PayloadTooLarge, match=str(MAX_IMAGE_BYTES)):
        image_of_base64("A" * (MAX_IMAGE_BYTES * 4 // 3 + 8), 0, "x")
    most = "A" * (MAX_IMAGE_BYTES * 4 // 3) + "\r\n" * 1000
    image = image_of_base64(most, 0, "x")
    assert image.base64 == most
    assert "AAAA" not in repr(image)


IMAGE = {"type": "image_url", "image_url": {"url": URL}}
REQUESTS = {
    "/v1/chat/completions?url": (
        chat([{"type": "image_url", "image_url": URL}]),
        "messages[0].content[0].image_url.url",
    ),
    "/v1/chat/completions": (chat([IMAGE]), "messages[0].content[0].image_url.url"),
    "/v1/responses": (
        {"model": WRITER, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
        "input[0].content[0].image_url",
    ),
    "/api/chat": ({"model": WRITER, "messages": [{"role": "user", "images": ["AAAA"]}]}, "messages[0].images[0]"),
    "/api/generate": ({"model": WRITER, "prompt": "x", "images": ["AAAA"]}, "images[0]"),
}


@pytest.fixture(scope="module")
def writer(store):
    """A model without vision; its engine is never started."""
    return built_models(store, WRITER)


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_model_without_vision_says_so_in_every_dialect(writer, path):
    body, where = REQUESTS[path]
    async with application(writer) as (client, _), client.post(path, json=body) as reply:
        error = (await reply.json())["error"]
        assert reply.status == 400
        assert (error if isinstance(error, str) else error["message"]).startswith(
            f"{where}: {WRITER} does not read images; this node has no vision model"
        )


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_only_the_user_sends_images(writer, role):
    body = {"model": WRITER, "messages": [{"role": role, "content": [IMAGE]}, {"role": "user", "content": "x"}]}
    async with application(writer) as (client, _), client.post("/v1/chat/completions", json=body) as reply:
        assert reply.status == 400
        assert "messages of the user only" in (await reply.json())["error"]["message"]


async def test_images_are_not_tokenized(writer):
    async with application(writer) as (client, _), client.post("/tokenize", json=chat([IMAGE])) as reply:
        assert reply.status == 400
