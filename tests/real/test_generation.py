"""SmolLM2 on the continuous-batching engine, over HTTP and by `npu-node run` as a person and a script use it."""

import asyncio
import os
import pty
import subprocess

import pytest

from tests.real.inference import ask, stream
from tests.support.nodes import NPU_NODE, run_node_command

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
PARIS = {"prompt": "What is the capital of France?", "max_new_tokens": 40}


@pytest.fixture(scope="session")
def node(whole_node):
    """What is asked here is answered in words."""
    return whole_node


async def streamed(http, node, **body):
    events = []
    await stream(http, node, body, lambda name, data: events.append((name, data)))
    *tokens, (last, done) = events
    assert {name for name, _ in tokens} == {"token"}
    assert last == "done"
    return [data["text"] for _, data in tokens], done


async def test_the_capital_of_france_is_paris(node, http):
    _, answer = await ask(http, node, PARIS)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert 0 < answer["timing_ms"]["first_token"] <= answer["timing_ms"]["total"]
    assert answer["npu_busy_delta_us"] is None


async def test_streamed_alone_or_beside_others_the_answer_is_the_same(node, http):
    _, alone = await ask(http, node, PARIS)
    pieces, done = await streamed(http, node, **PARIS)
    assert "".join(pieces) == alone["text"]
    assert len(pieces) > 5
    assert done["usage"] == alone["usage"]
    assert "text" not in done
    others = [{"prompt": f"Count from {i} to {i + 20}.", "max_new_tokens": 40} for i in range(15)]
    answers = await asyncio.gather(*(ask(http, node, body) for body in (PARIS, *others)))
    beside, *rest = (answer for _, answer in answers)
    assert beside["text"] == alone["text"]
    assert beside["usage"] == alone["usage"]
    assert all(answer["usage"]["completion_tokens"] for answer in rest)


async def test_limits_and_stops_end_the_answer(node, http):
    _, short = await ask(http, node, PARIS | {"max_new_tokens": 3})
    assert (short["finish_reason"], short["usage"]["completion_tokens"]) == ("length", 3)
    _, whole = await ask(http, node, PARIS)
    _, stopped = await ask(http, node, PARIS | {"stop": [" Paris"]})
    assert (stopped["text"], " Paris") == whole["text"].partition(" Paris")[:2]
    assert stopped["finish_reason"] == "stop"
    pieces, _ = await streamed(http, node, **PARIS, stop=" Paris")
    assert "".join(pieces) == stopped["text"]


def run(*arguments, stdin="", **environment):
    return run_node_command(["run", *arguments], input=stdin, timeout=500, env=os.environ | environment)


def test_a_prompt_is_answered_by_the_running_node(node):
    done = run("smollm2", "--verbose", "What is the capital of France?", NPU_NODE_URL=node.url)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "[CPU: " in done.stderr
    assert " tokens, " in done.stderr
    done = run("smollm2", stdin="What is the capital of France?\n", NPU_NODE_URL=node.url)
    assert "Paris" in done.stdout


def test_a_terminal_gets_a_conversation(node):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*NPU_NODE, "run", "smollm2"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"NPU_NODE_URL": node.url, "TERM": "dumb"},
    )
    os.close(theirs)
    try:
        os.write(ours, b'"""What is the capital\nof France?"""\n/bye\n')
        out, _ = process.communicate(timeout=500)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert process.returncode == 0
    assert "Paris" in out
