"""The stock Python clients, openai and ollama, against a real node on real weights."""

import openai
import pytest
from pydantic import BaseModel

from tests.support.gateway import WAYS, reached
from tests.support.later import Later

ollama = Later("ollama")


MODEL = "smollm2:135m"
EMBEDDER = "all-minilm"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    """What an answer is parsed into."""

    name: str
    people: int


@pytest.fixture(scope="module", params=WAYS)
def node(request, whole_node):
    """What is asked here is answered in words, by the node itself and through the gateway."""
    with reached(whole_node, request.param) as node:
        yield node


def get_weather(city: str) -> str:
    """Get the weather.

    Args:
        city: which city
    """
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def client(node):
    with openai.OpenAI(base_url=node.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def local(node):
    client = ollama.Client(host=node.url)
    yield client
    client._client.close()


def test_openai_chat(client):
    reply = client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=32)
    assert "Paris" in reply.choices[0].message.content
    with client.chat.completions.stream(model=MODEL, messages=CAPITAL, max_tokens=32) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == reply.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_openai_completions(client):
    reply = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=8, logprobs=1)
    assert reply.choices[0].finish_reason == "length"
    streamed = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == reply.choices[0].text


def test_openai_best_of_returns_the_likeliest_first(client):
    asked = {"prompt": ["The best of all cities is", "Once"], "max_tokens": 8, "temperature": 1.5, "logprobs": 0}
    reply = client.completions.create(model=MODEL, n=3, best_of=6, extra_body={"ignore_eos": True}, **asked)
    likely = [sum(choice.logprobs.token_logprobs) for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3, 4, 5]
    assert likely == [*sorted(likely[:3], reverse=True), *sorted(likely[3:], reverse=True)]
    assert reply.usage.completion_tokens == 2 * 6 * 8, "those that are not returned count, too"
    several = client.completions.create(model=MODEL, n=10, **asked | {"prompt": "Once"}).choices
    likely = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in several]
    assert likely != sorted(likely, reverse=True), "without best_of they stay in the order of their seeds"


def test_openai_embeddings_come_as_base64_by_themselves(client):
    packed = client.embeddings.create(model=EMBEDDER, input=["a text", "another"])
    plain = client.embeddings.create(model=EMBEDDER, input=["a text", "another"], encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 2e-3


def test_openai_parses_into_a_model(client):
    reply = client.chat.completions.parse(model=MODEL, messages=CAPITAL, response_format=City, max_tokens=200)
    assert isinstance(reply.choices[0].message.parsed, City)


def test_openai_tools(client):
    tool = openai.pydantic_function_tool(City, name="remember")
    reply = client.chat.completions.parse(
        model=MODEL, messages=CAPITAL, tools=[tool], tool_choice="required", max_tokens=200
    )
    (call,) = reply.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, City)


def test_openai_models_and_errors(client):
    assert client.models.retrieve(MODEL).id in {model.id for model in client.models.list()}
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("no-such-model")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=CAPITAL, logit_bias={"1": 1})
    assert refused.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 9000}])
    assert too_long.value.code == "context_length_exceeded"


def test_ollama_chat_and_generate(local):
    reply = local.chat(model=MODEL, messages=CAPITAL, options={"num_predict": 32})
    assert "Paris" in reply.message.content
    assert reply.eval_count > 0
    streamed = list(local.chat(model=MODEL, messages=CAPITAL, options={"num_predict": 32}, stream=True))
    assert "".join(part.message.content for part in streamed) == reply.message.content
    assert streamed[-1].done_reason == "stop"
    generated = local.generate(model=MODEL, prompt=CAPITAL[0]["content"], options={"num_predict": 32})
    assert generated.response == reply.message.content


def test_ollama_format_and_tools(local):
    reply = local.chat(model=MODEL, messages=CAPITAL, format=City.model_json_schema(), options={"num_predict": 200})
    assert City.model_validate_json(reply.message.content)
    reply = local.chat(model=MODEL, messages=CAPITAL, tools=[get_weather], options={"num_predict": 8})
    assert reply.done


def test_ollama_embeddings(local):
    reply = local.embed(model=EMBEDDER, input=["a text", "another"])
    assert [len(vector) for vector in reply.embeddings] == [384, 384]
    assert len(local.embeddings(model=EMBEDDER, prompt="a text").embedding) == 384


def test_ollama_pulls_of_a_node_itself(whole_node):
    client = ollama.Client(host=whole_node.url)
    assert list(client.pull("smollm2", stream=True))[-1].status == "success"
    client._client.close()


def test_ollama_models_and_errors(local):
    assert {"smollm2-135m-instruct:latest"} <= {model.model for model in local.list().models}
    assert {model.model for model in local.ps().models} <= {model.model for model in local.list().models}
    assert local.show(MODEL).capabilities == ["completion", "tools"]
    with pytest.raises(ollama.ResponseError) as missing:
        local.chat(model="no-such-model", messages=CAPITAL)
    assert (missing.value.status_code, missing.value.error) == (404, "model 'no-such-model' not found")
    with pytest.raises(ollama.ResponseError) as refused:
        local.generate(model=MODEL, prompt="x", options={"mirostat": 2})
    assert "mirostat" in refused.value.error
