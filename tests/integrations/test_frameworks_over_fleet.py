"""Frameworks with the SDK clients of this package, over three nodes of which one is killed on the way.

In the suite the nodes are scripted, and what passes is the transport; with --long they are real, on real weights, and
LangChain's standard tests run as a whole.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from backend_client.testing import FakeFleet
from tests.real.test_langchain import LEFT_OUT, ONE_LOOP
from tests.support.foreign import environment, run_suite
from tests.support.nodes import start_node

pytestmark = pytest.mark.timeout(1200)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODELS = [
    {"name": "all-minilm-l6-v2"},
    # Another name for the same model, so that a test sees which of the two was asked for.
    {"name": "smollm2-135m-instruct", "aliases": ["smollm2"]},
]
REAL = {"CHAT_MODEL": "smollm2", "OTHER_CHAT_MODEL": "smollm2-135m-instruct", "EMBEDDING_MODEL": "all-minilm-l6-v2"}
FAKE = {"CHAT_MODEL": "fake-writer", "OTHER_CHAT_MODEL": "fake-writer", "EMBEDDING_MODEL": "fake-embedder"}
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
    victims = queue.SimpleQueue()

    def answering(index):
        def answer(body):
            if next(chats) == after:
                victims.put(index)
            return json.dumps(PERSON) if body.get("response_format") else "Paris is the capital of France."

        return answer

    with FakeFleet(3) as fleet:
        for index, node in enumerate(fleet):
            node.tool_call = ("Person", PERSON)
            node.answer = answering(index)

        def kill():
            if (victim := victims.get()) is not None:
                fleet.kill(victim)

        killer = threading.Thread(target=kill)
        killer.start()
        yield fleet.environment() | FAKE
        # None: not enough chats came for it, and the test has shown nothing.
        victims.put(None)
        killer.join()
        assert next(chats) > after


@pytest.fixture
def three_nodes(request):
    """Three real nodes."""
    request.getfixturevalue("store")
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(start_node(NPU_NODE_MODELS=json.dumps(MODELS), ready=False)) for _ in range(3)]
        for node in nodes:
            node.wait_for(lambda body: body["status"] == "ready")
        yield nodes


def environment_of(nodes):
    return {"NPU_CLIENT_NODES": ",".join(node.url for node in nodes)} | REAL


def langchain(tmp_path, paths, **env):
    return run_suite(
        environment(HERE / "environments" / "langchain.txt"),
        paths,
        HERE / "environments",
        tmp_path / "report.xml",
        deselected=[
            f"langchain_over_fleet.py::{test.replace('TestOpenAIChat', 'TestChat')}"
            for test in LEFT_OUT
            if test.startswith("TestOpenAIChat")
        ],
        settings=ONE_LOOP,
        PYTHONPATH=f"{ROOT}{os.pathsep}{HERE / 'plugins'}",
        **env,
    )


def calls(name, rounds, env):
    """Start the script of a framework."""
    return subprocess.Popen(
        [environment(HERE / "environments" / f"{name}.txt"), HERE / "frameworks_over_fleet" / f"{name}_calls.py"],
        env=os.environ | env | {"ROUNDS": str(rounds), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_langchain_while_one_of_three_scripted_nodes_dies(tmp_path):
    # More than 5 s: LangChain takes that long to import.
    with scripted_fleet(after=2) as env:
        outcome = langchain(tmp_path, [f"langchain_over_fleet.py::{test}" for test in SHORT], **env)
    # Streams are asked for in two versions of its events.
    assert (outcome.passed, outcome.failed, outcome.skipped) == (len(SHORT) + 2, 0, 0), outcome.told


# At answers that come whole: a stream in the middle would rightly break.
@pytest.mark.parametrize(("name", "after"), [("instructor", 2), ("llamaindex", 4)])
def test_a_framework_while_one_of_three_scripted_nodes_dies(name, after):
    # More than 5 s: these too are imported first.
    with scripted_fleet(after) as env, calls(name, 4, env) as process:
        told, _ = process.communicate(timeout=100)
    assert process.returncode == 0, told[-4000:]
    assert told.strip().endswith("all as expected")


@pytest.mark.long
def test_langchains_standard_tests_while_one_of_three_nodes_is_killed(tmp_path, three_nodes):
    # Minutes: dozens of answers of up to 128 tokens.
    outcome = langchain(
        tmp_path,
        ["langchain_over_fleet.py"],
        PYTEST_PLUGINS="killing",
        KILL_AFTER="10",
        KILL_VICTIM=str(three_nodes[0].process.pid),
        **environment_of(three_nodes),
    )
    assert three_nodes[0].process.wait(10) == -signal.SIGKILL
    assert outcome.failed == 0, outcome.told
    assert outcome.passed > 35, outcome.told


@pytest.mark.long
@pytest.mark.parametrize("name", ["instructor", "llamaindex"])
def test_a_framework_while_one_of_three_nodes_is_killed(name, three_nodes):
    with calls(name, 6, environment_of(three_nodes)) as process:
        # In the middle: once it answers.
        three_nodes[0].wait_for(lambda body: any(model["in_flight"] for model in body["models"]))
        three_nodes[0].process.kill()
        told, _ = process.communicate(timeout=400)
    assert process.returncode == 0, told[-4000:]
    assert told.strip().endswith("all as expected")
