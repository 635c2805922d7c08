"""POST /v1/responses through the stock client, on real weights."""

import json

import openai
import pytest

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]},
}


@pytest.fixture
def client(node):
    with openai.OpenAI(base_url=node.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_response_answers_as_a_chat_does_and_is_not_stored(client):
    response = client.responses.create(model=MODEL, input=QUESTION)
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": QUESTION}])
    assert response.status == "completed"
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.store is False
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(response.id)


@pytest.mark.parametrize(
    "earlier",
    [{"previous_response_id": "resp_0"}, {"previous_response_id": "../../dashboard/state"}, {"conversation": "c"}],
)
def test_earlier_turns_are_sent_as_input(client, earlier):
    with pytest.raises(openai.BadRequestError, match="send the conversation so far in `input`"):
        client.responses.create(model=MODEL, input=QUESTION, **earlier)
    with pytest.raises(openai.BadRequestError, match=r"item_reference: .*send the conversation so far in `input`"):
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_0"}])
    raw = client.responses.with_raw_response.create(model=MODEL, input=QUESTION, store=True, max_output_tokens=1)
    assert "store" in raw.headers["X-NPU-Node-Ignored"]


def test_items_and_instructions_are_a_conversation(client):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": QUESTION},
    ]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}, *items[1:]]
    response = client.responses.create(model=MODEL, input=items, instructions="Be brief.", max_output_tokens=2)
    chat = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=2)
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_the_events_of_a_stream_are_openais_in_order(client):
    whole = client.responses.create(model=MODEL, input=QUESTION)
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call_has_the_tools_arguments_and_can_be_answered(client, choice):
    response = client.responses.create(
        model=MODEL, input=QUESTION, tools=[TOOL], tool_choice=choice, max_output_tokens=60
    )
    (call,) = response.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert set(json.loads(call.arguments)) == {"city"}
    history = [
        {"role": "user", "content": QUESTION},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    again = client.responses.create(model=MODEL, input=history, tools=[TOOL], max_output_tokens=8)
    assert again.usage.input_tokens > response.usage.input_tokens


def test_a_calls_arguments_are_streamed_in_pieces(client):
    with client.responses.stream(
        model=MODEL, input=QUESTION, tools=[TOOL], tool_choice="required", max_output_tokens=60
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output[0].arguments
    assert len(deltas) > 3
