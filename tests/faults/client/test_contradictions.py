"""A node that contradicts its own /health is not believed: neither its vectors nor the name of another model."""

import contextlib

import pytest
from aiohttp import web

from backend_client import ClientOptions, CloudClient, CloudSettings, NPUClient, NPUUnavailableError, StreamInterrupted
from backend_client.cloud.attempt import check_model
from backend_client.errors import CloudUnavailable, ModelNotFound
from backend_client.http.messages import NotAnAnswer
from backend_client.options import BreakerOptions
from tests.faults.scripted_node import EMBEDDER, WRITER, choice, vectors_for
from tests.faults.scripted_node import streamed as events

QUESTION = [{"role": "user", "content": "Where?"}]
# No trial within a test.
LONG = ClientOptions(affinity=False, breaker=BreakerOptions(base=600.0, longest_model=600.0))
OTHER = "tiny-other"


@pytest.fixture
async def trio(pair, scripted):
    return [*pair, scripted]


def urls(nodes):
    return [node.url for node in nodes]


async def outcomes(client, calls=30):
    """The lengths of vectors that calls get, and the outcomes of their attempts by node."""
    results = [await client.embed_result(f"text {index}") for index in range(calls)]
    tried = {(attempt.node, attempt.outcome) for result in results for attempt in result.attempts}
    return {len(result.vector) for result in results}, tried


@pytest.mark.parametrize("others", [1, 2])
async def test_a_node_that_answers_other_vectors_than_it_reports_is_not_believed(trio, others):
    liar, *honest = nodes = trio[: 1 + others]
    liar.answers = 2
    async with NPUClient([liar.url], options=LONG) as client:
        with pytest.raises(NPUUnavailableError, match=r"2 dimensions came .* its own /health says 8"):
            await client.embed("text", timeout=2)
        # Nothing was learned from it, and its other models go on.
        client.fleet.runtime.add(urls(honest))
        await client.health()
        lengths, tried = await outcomes(client)
        assert lengths == {8}
        assert {pair for pair in tried if pair[0] != liar.url} == {(node.url, "ok") for node in honest}
        found = [await client.generate("prompt") for _ in range(20)]
        assert {result.node for result in found} == set(urls(nodes))
        # Its model is ejected after one such answer.
        assert len([body for body in liar.bodies if "texts" in body]) == 1


@pytest.mark.parametrize(
    ("asked", "space", "length", "outcome"),
    [
        (4, "space-a-4", 4, "ok"),
        (8, "space-a", 8, "ok"),
        (4, "space-b-4", 4, "SpaceChanged"),
        (4, "space-a-2", 4, "SpaceChanged"),
        (None, "space-a-4", 4, "SpaceChanged"),
        (4, "space-a-4", 2, "BadReply"),
        (4, "space-a", 4, "BadReply"),
        (16, "space-a", 16, "BadReply"),
        (16, "space-a-16", 16, "BadReply"),
    ],
)
async def test_vectors_that_were_cut_are_in_a_space_of_their_own(scripted, asked, space, length, outcome):
    async def respond(_):
        headers = {"X-Space": space, "X-Shape": f"1,{length}", "X-Model": EMBEDDER}
        return web.Response(body=vectors_for(["text"], length).tobytes(), headers=headers)

    scripted.respond = respond
    async with NPUClient([scripted.url]) as client:
        if outcome == "ok":
            result = await client.embed_result("text", dimensions=asked)
            assert (result.space, len(result.vector)) == (space, length)
        else:
            with pytest.raises(NPUUnavailableError) as caught:
                await client.embed("text", dimensions=asked, timeout=3)
            assert caught.value.attempts[0].outcome == outcome
        assert client.spaces == {EMBEDDER: "space-a"}


CALLS = pytest.mark.parametrize(
    "call",
    [
        lambda client, **options: client.generate("prompt", model=WRITER, **options),
        lambda client, **options: client.chat(QUESTION, model=WRITER, **options),
        lambda client, **options: client.post(
            "/v1/chat/completions", {"model": WRITER, "messages": QUESTION}, **options
        ),
        lambda client, **options: streamed(client.stream("prompt", model=WRITER, **options)),
        lambda client, **options: streamed(client.stream_chat(QUESTION, model=WRITER, **options)),
        lambda client, **options: client.embed_result("text", model=EMBEDDER, **options),
    ],
    ids=["generate", "chat", "post", "stream", "stream_chat", "embed"],
)


@pytest.mark.parametrize("listed", [True, False])
@CALLS
async def test_the_answer_of_another_model_is_answered_by_another_node(pair, call, listed):
    liar, honest = pair
    liar.answers_as = OTHER
    if listed:
        liar.offer("generation", OTHER)
    async with NPUClient(urls(pair), options=LONG) as client:
        while len((result := await call(client)).attempts) == 1:
            pass
        assert [(attempt.node, attempt.outcome) for attempt in result.attempts] == [
            (liar.url, "BadReply"),
            (honest.url, "ok"),
        ]
        assert result.model in {WRITER, EMBEDDER}
        # It is ejected for that model alone, and nothing was learned of names.
        before = len(liar.requests)
        for _ in range(10):
            assert (await call(client)).node == honest.url
        assert len(liar.requests) == before
        liar.answers_as = None
        if result.model == WRITER:
            found = [await client.embed_result(f"text {index}") for index in range(20)]
            assert {each.node for each in found} == {liar.url, honest.url}
        if not listed:
            with pytest.raises(ModelNotFound):
                await client.generate("prompt", model=OTHER)


@pytest.mark.parametrize(("named", "outcome"), [(EMBEDDER, "ok"), (OTHER, "BadReply")])
async def test_a_whole_reply_is_read_for_another_models_name_where_its_head_has_none(scripted, named, outcome):
    async def respond(_):
        rows = [{"object": "embedding", "index": 0, "embedding": [1.0] * 8}]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        body = {"object": "list", "data": rows, "model": named, "usage": usage}
        return web.json_response(body, headers={"X-Space": "space-a"})

    scripted.respond = respond
    asked = {"model": EMBEDDER, "input": "text"}
    async with NPUClient([scripted.url]) as client:
        try:
            attempts = (await client.post("/v1/embeddings", asked, timeout=3)).attempts
        except NPUUnavailableError as error:
            attempts = error.attempts
    assert attempts[0].outcome == outcome


@pytest.mark.parametrize("device", ["GPU", None])
@CALLS
async def test_the_answer_of_another_device_than_was_required_is_answered_by_another_node(pair, call, device):
    liar, honest = pair
    liar.answers_on = device
    async with NPUClient(urls(pair), options=LONG) as client:
        tried = []
        for _ in range(30):
            result = await call(client, require_device="CPU")
            assert (result.node, result.device) == (honest.url, "CPU")
            tried += [attempt.outcome for attempt in result.attempts if attempt.node == liar.url]
        assert tried == ["BadReply"]


async def streamed(stream):
    assert [piece async for piece in stream]
    return stream.result


async def test_a_name_that_health_lists_is_answered_by_its_model(pair, client):
    for node in pair:
        node.alias(prod=WRITER)
    assert (await client.generate("prompt", model="prod")).model == WRITER
    assert (await client.chat(QUESTION, model="Prod:latest")).model == WRITER
    with pytest.raises(ModelNotFound):
        await client.generate("prompt", model="production")
    assert [attempt.outcome for attempt in (await client.chat(QUESTION)).attempts] == ["ok"]


async def chunks_of_another(request):
    body = await request.json()
    if "input" in body:
        return web.json_response({"model": "gpt-4o-mini", "data": [{"index": 0, "embedding": [1.0, 2.0]}]})
    if body.get("stream"):
        return events({"model": "gpt-4o-mini", "choices": [choice({"content": "Paris"}, "stop")]})
    choices = [{"index": 0, "message": {"role": "assistant", "content": "Paris"}, "finish_reason": "stop"}]
    return web.json_response({"model": "gpt-4o-mini", "choices": choices})


@pytest.mark.parametrize("named", [False, True])
async def test_no_answer_of_another_model_of_the_cloud_is_believed_unless_the_settings_name_it(cloud, named):
    mapped = {"chat_model": "gpt-4o", "embedding_models": {"space-a": "gpt-4o"}}
    names = {"gpt-4o": ("gpt-4o-mini",)} if named else {}
    cloud.respond = chunks_of_another
    async with CloudClient(CloudSettings(api_key="k", base_url=cloud.url, answers_as=names, **mapped)) as client:
        for call in (client.generate("Where?"), client.chat(QUESTION), streamed(client.stream("Where?"))):
            if named:
                assert (await call).text == "Paris"
            else:
                with pytest.raises((CloudUnavailable, StreamInterrupted), match=r"cloud\.answers_as\.gpt-4o"):
                    await call
        with pytest.raises(CloudUnavailable, match="another model answered than gpt-4o"):
            await client.embed("Where?")


@pytest.mark.parametrize(
    ("asked", "answered", "names", "believed"),
    [
        ("gpt-4o", "gpt-4o-2024-08-06", (), True),
        ("gpt-4", "gpt-4-0613", (), True),
        ("mistral-large-latest", "mistral-large-2411", (), True),
        ("any", None, (), True),
        ("openai/gpt-4o", "gpt-4o-2024-08-06", (), True),
        ("gpt-4o", "openai/gpt-4o-2024-08-06", (), True),
        ("my-deployment", "gpt-4o-mini-2024-07-18", ("gpt-4o-mini",), True),
        ("my-deployment", "azure/gpt-4o-mini", ("gpt-4", "gpt-4o-mini"), True),
        ("openrouter/auto", "anything", ("*",), True),
        ("gpt-4o", "gpt-4o-mini", (), False),
        ("gpt-4", "gpt-4-32k", (), False),
        ("gpt-4o-2024-08-06", "gpt-4o", (), False),
        ("gpt-4o", 5, (), False),
    ],
)
def test_a_cloud_may_answer_as_a_version_of_the_model_or_under_a_name_of_the_settings(asked, answered, names, believed):
    with contextlib.nullcontext() if believed else pytest.raises(NotAnAnswer):
        check_model(asked, {"model": answered}, names)
    if names:
        with pytest.raises(NotAnAnswer):
            check_model(asked, {"model": answered})
