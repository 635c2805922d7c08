"""A conversation that cannot fit the model is refused before its template is rendered."""

import pytest

from tests.support.application import built_models
from worker_node.core.errors import ContextLengthExceeded
from worker_node.core.types import Message


def test_more_messages_than_the_context_has_tokens_are_refused_unrendered(store):
    [model] = built_models(store, "smollm2-135m-instruct")
    chat = model.tokenizer
    assert chat.encode_chat([Message("user", "a")] * 100)
    with pytest.raises(ContextLengthExceeded, match=r"8193 messages") as refused:
        chat.render([Message("user", "")] * 8193)
    assert refused.value.param == "messages"
