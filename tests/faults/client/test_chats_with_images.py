"""Chats with images, and texts, at models that report the kind `vision`: by every client, over real sockets."""

import pydantic
import pytest

from backend_client import ConfigurationError, NPUClient, RequestRejected
from backend_client.http.messages import writing_kind
from backend_client.testing import FakeFleet
from tests.faults.scripted_node import WRITER as TEXT_MODEL

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PICTURE = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is it?"}]}]
TEXT = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]
VIEWER, WRITER = "fake-viewer", "fake-writer"


class Seen(pydantic.BaseModel):
    colour: str


@pytest.fixture
def fleet():
    with FakeFleet(1) as fleet:
        fleet[0].offers = {"embedding", "generation", "vision"}
        fleet[0].answer = "It is red."
        yield fleet


def models(fleet):
    return [request.body["model"] for request in fleet.requests]


@pytest.mark.parametrize("offers", [{"vision"}, {"generation", "vision"}])
@pytest.mark.parametrize("named", [{"model": VIEWER}, {}])
async def test_every_method_for_chats_reaches_the_model_that_reads_images(fleet, offers, named):
    fleet[0].offers = offers
    async with fleet.async_client() as client:
        assert (await client.chat(PICTURE, **named)).text == "It is red."
        async with client.stream_chat(PICTURE, **named) as stream:
            assert "".join([delta.text async for delta in stream]) == "It is red."
        assert await client.count_tokens(PICTURE, **named) > 0
        reply = await client.post("/v1/chat/completions", {"messages": PICTURE, **named})
        assert reply.body["choices"][0]["message"]["content"] == "It is red."
        fleet[0].answer = '{"colour": "red"}'
        assert (await client.parse(PICTURE, Seen, **named)).colour == "red"
    assert models(fleet) == [VIEWER] * 5
    assert all(request.body["messages"] == PICTURE for request in fleet.requests)


async def test_a_model_for_vision_answers_texts_where_it_is_named_or_alone(fleet):
    async with fleet.async_client() as client:
        assert (await client.chat(TEXT, model=VIEWER)).text == "It is red."
        assert (await client.generate("prompt", model=VIEWER)).text == "It is red."
        assert "".join([piece async for piece in client.stream("prompt", model=VIEWER)]) == "It is red."
    fleet[0].offers = {"embedding", "vision"}
    async with fleet.async_client() as client:
        assert (await client.chat(TEXT)).model == VIEWER
        assert (await client.generate("prompt")).model == VIEWER
        assert await client.count_tokens("two words") == 2
    assert models(fleet) == [VIEWER] * 6


async def test_images_for_a_model_that_reads_none_are_refused_by_the_node_and_not_retried(fleet):
    async with fleet.async_client() as client:
        with pytest.raises(RequestRejected) as caught:
            await client.chat(PICTURE, model=WRITER)
    assert caught.value.status == 400
    assert models(fleet) == [WRITER]


async def test_several_models_for_vision_are_no_default(scripted):
    for name in (VIEWER, "another-viewer"):
        scripted.offer("vision", name)
    async with NPUClient([scripted.url]) as client:
        with pytest.raises(ConfigurationError, match="another-viewer, fake-viewer"):
            await client.chat(PICTURE)
        assert (await client.generate("prompt")).model == TEXT_MODEL
        del scripted.models[TEXT_MODEL]
    async with NPUClient([scripted.url]) as client:
        with pytest.raises(ConfigurationError, match="another-viewer, fake-viewer"):
            await client.generate("prompt")
    assert [body["model"] for body in scripted.bodies] == [TEXT_MODEL]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("vision", {"messages": PICTURE}),
        ("vision", {"messages": [*TEXT, {"role": "assistant", "content": "Red."}, *PICTURE]}),
        ("vision", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}),
        ("generation", {"messages": TEXT}),
        ("generation", {"messages": [{"role": "user", "content": "image_url"}]}),
        ("generation", {"input": "text"}),
        ("generation", {"prompt": "text", "messages": None}),
        ("generation", {"messages": [None, 1, {"content": [None, {"type": ["image_url"]}, {"type": None}]}]}),
    ],
)
def test_an_image_anywhere_in_a_request_requires_a_model_for_vision(kind, body):
    assert writing_kind(body) == kind
