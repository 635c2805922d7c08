"""LangChain's own standard tests, over its clients for OpenAI and for Ollama, against a real node on real weights."""

from pathlib import Path

import pytest

from tests.support.foreign import environment, run_suite

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
# Only with --long, since each writes long answers: a form of the same, test_structured_output[pydantic] or test_batch,
# always runs.
LONG = [
    f"{kind}::{test}"
    for kind in ("TestOpenAIChat", "TestOllamaChat")
    for test in (
        "test_abatch",
        "test_structured_output[json_schema]",
        "test_structured_output[typeddict]",
        "test_structured_output_async[",
        "test_structured_output_optional_param",
        "test_structured_output_pydantic_2_v1",
    )
]
ONE_LOOP = [
    "asyncio_mode=auto",
    "asyncio_default_test_loop_scope=session",
    "asyncio_default_fixture_loop_scope=session",
    "timeout=100",
]


def test_langchains_standard_tests(node, tmp_path, long):
    # A minute: dozens of answers of up to 128 tokens, of which LangChain parses many, so that they must be whole.
    outcome = run_suite(
        environment(HERE / "langchain.txt"),
        ["langchain_standard.py"],
        HERE,
        tmp_path / "report.xml",
        deselected=[f"langchain_standard.py::{test}" for test in (LEFT_OUT if long else [*LEFT_OUT, *LONG])],
        settings=ONE_LOOP,
        NODE_URL=node.url,
    )
    assert outcome.failed == 0, outcome.told
    # Skipped by LangChain itself: images, audio, documents, json_mode, recorded answers, and tool_choice over Ollama.
    later = 0 if long else 16
    assert (outcome.passed, outcome.deselected, outcome.skipped) == (83 - later, 10 + later, 17), outcome.told
