"""LangChain's own standard tests, over its clients for OpenAI and for Ollama, against a real node."""

import contextlib
from pathlib import Path

import pytest

from tests.support.foreign import environment, run_suite
from tests.support.gateway import WAYS, reached
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent / "environments"
OF_ITS_OWN_ACCORD = (
    "a model of 135 million parameters does not call a tool of its own accord, and nothing forces it here"
)
LEFT_OUT = {
    "TestOpenAIChat::test_agent_loop": OF_ITS_OWN_ACCORD,
    "TestOllamaChat::test_agent_loop": OF_ITS_OWN_ACCORD,
    "TestOllamaChat::test_bind_runnables_as_tools": OF_ITS_OWN_ACCORD,
    "TestOllamaChat::test_tool_calling[": OF_ITS_OWN_ACCORD,
    "TestOllamaChat::test_tool_calling_async": OF_ITS_OWN_ACCORD,
    "TestOllamaChat::test_tool_calling_with_no_arguments": OF_ITS_OWN_ACCORD,
    "TestOllamaChat::test_unicode_tool_call_integration": OF_ITS_OWN_ACCORD,
}
# Without --long, one of each mechanism: answers and streams with their usage, a stop sequence, a turn with a
# tool's result, an answer of a schema, embeddings. With it, all that LangChain has.
SHORT = [
    *(
        f"{kind}::{test}"
        for kind in ("TestOpenAIChat", "TestOllamaChat")
        for test in (
            "test_usage_metadata_streaming",
            "test_stop_sequence",
            "test_tool_message_histories_string_content",
            "test_structured_output[pydantic]",
        )
    ),
    "TestOpenAIEmbeddings::test_embed_documents",
    "TestOllamaEmbeddings::test_aembed_query",
]
ONE_LOOP = [
    "asyncio_mode=auto",
    "asyncio_default_test_loop_scope=session",
    "asyncio_default_fixture_loop_scope=session",
    "timeout=100",
]


@pytest.mark.parametrize("way", WAYS)
def test_langchains_standard_tests(node, tmp_path, long, way):
    # More than 5 s: LangChain is imported, and its answers have up to 128 tokens, so that they are whole; with --long
    # dozens of them, a minute, on whole weights.
    # Of the gateway's way the short set is enough: what it adds is the same in each.
    every = long and way == WAYS[0]
    with start_node() if every else contextlib.nullcontext(node) as near, reached(near, way) as used:
        outcome = run_suite(
            environment(HERE / "langchain.txt"),
            ["langchain_standard.py"] if every else [f"langchain_standard.py::{test}" for test in SHORT],
            HERE,
            tmp_path / "report.xml",
            deselected=[f"langchain_standard.py::{test}" for test in LEFT_OUT],
            settings=ONE_LOOP,
            NODE_URL=used.url,
        )
    assert outcome.failed == 0, outcome.told
    # Skipped by LangChain itself: images, audio, documents, json_mode, recorded answers, and tool_choice over Ollama.
    expected = (83, 10, 17) if every else (len(SHORT), 0, 0)
    assert (outcome.passed, outcome.deselected, outcome.skipped) == expected, outcome.told
