"""Frameworks with the SDK clients of this package, over three scripted nodes of which one is killed on the way."""

import contextlib
import itertools
import json
import threading
from pathlib import Path

import pytest

from backend_client.testing import FakeFleet
from tests.integrations.test_langchain import ONE_LOOP
from tests.support.foreign import environment, output_of, run_suite

pytestmark = pytest.mark.timeout(1200)

ENVIRONMENTS = Path(__file__).parent / "environments"
ROOT = str(ENVIRONMENTS.parents[2])
MODELS = {"CHAT_MODEL": "fake-writer", "EMBEDDING_MODEL": "fake-embedder"}
PERSON = {"name": "Ana", "age": 30}
# One of each mechanism: whole and streamed answers, both clients, many at once, usage, embeddings.
SHORT = [
    *(f"TestChat::{name}" for name in ("test_invoke", "test_ainvoke", "test_stream", "test_astream", "test_abatch")),
    "TestChat::test_usage_metadata_streaming",
    "TestEmbeddings::test_embed_documents",
    "TestEmbeddings::test_aembed_query",
]


@contextlib.contextmanager
def scripted_fleet(after):
    """The environment of three scripted nodes; the one that answers the `after`th chat stops then."""
    chats = itertools.count(1)

    def answering(index):
        def answer(body):
            if next(chats) == after:
                # In another thread: this one is the fleet's own.
                threading.Thread(target=fleet.kill, args=(index,)).start()
            return json.dumps(PERSON) if body.get("response_format") else "Paris is the capital of France."

        return answer

    with FakeFleet(3) as fleet:
        for index, node in enumerate(fleet):
            node.tool_call = ("Person", PERSON)
            node.answer = answering(index)
        yield fleet.environment() | MODELS
        assert next(chats) > after, "too few chats came for it, and the test has shown nothing"


def test_langchain_while_one_of_three_nodes_dies(tmp_path):
    # More than 5 s: LangChain takes that long to import.
    with scripted_fleet(after=2) as env:
        outcome = run_suite(
            environment(ENVIRONMENTS / "langchain.txt"),
            [f"langchain_over_fleet.py::{test}" for test in SHORT],
            ENVIRONMENTS,
            tmp_path / "report.xml",
            deselected=[],
            settings=ONE_LOOP,
            PYTHONPATH=ROOT,
            **env,
        )
    # Streams are asked for in two versions of its events.
    assert (outcome.passed, outcome.failed, outcome.skipped) == (len(SHORT) + 2, 0, 0), outcome.told


def test_instructor_while_one_of_three_nodes_dies():
    # The node dies at an answer that comes whole: a stream in the middle would rightly break.
    python = environment(ENVIRONMENTS / "instructor.txt")
    with scripted_fleet(after=2) as env:
        told = output_of(python, ENVIRONMENTS / "instructor_over_fleet.py", PYTHONPATH=ROOT, **env)
    assert told.endswith("all as expected\n")
