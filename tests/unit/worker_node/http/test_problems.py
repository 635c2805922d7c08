"""An error about a field with several forms names the form that was meant."""

import pytest
from pydantic import ValidationError

from worker_node.http.body import explain
from worker_node.tasks.generate.http.openai import ChatBody, CompletionsBody
from worker_node.tasks.generate.http.responses_body import ResponsesBody

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = {"type": "text", "text": 5}
CALL = {"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"}
CASES = [
    (ChatBody, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        ChatBody,
        {"messages": [{"role": "user", "content": [TEXT]}]},
        "messages[0].content[0].text",
    ),
    (ChatBody, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (ChatBody, {"messages": [{"role": "prophet", "content": "x"}]}, "messages[0]"),
    (ChatBody, {"messages": HELLO, "stop": [5]}, "stop[0]"),
    (ChatBody, {"messages": HELLO, "stop": 5}, "stop"),
    (CompletionsBody, {"prompt": ["a", 5]}, "prompt[1]"),
    (CompletionsBody, {"prompt": 5}, "prompt"),
    (
        ResponsesBody,
        {"input": [CALL]},
        "input[0].call_id",
    ),
    (ResponsesBody, {"input": [{"type": "invented"}]}, "input[0]"),
    (ResponsesBody, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    (ResponsesBody, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    (ResponsesBody, {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]"),
    (ChatBody, {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
]


@pytest.mark.parametrize(("model", "body", "param"), CASES)
def test_only_the_problem_of_the_intended_form_is_named(model, body, param):
    body = {"model": "m"} | body
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    message, where = explain(refused.value, body)
    assert where.startswith(param)
    assert ";" not in message
    assert "more problems" not in message


def test_a_body_that_is_no_json_has_no_place_to_name():
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate_json(b"{")
    message, where = explain(refused.value, None)
    assert "JSON" in message
    assert where is None
