"""`npu-node run` as a person and a script use it: on a running node."""

import os
import pty
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "worker_node", "run"]


@pytest.fixture(scope="session")
def node(whole_node):
    """What is asked here is answered in words."""
    return whole_node


def run(*arguments, stdin="", **environment):
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env=os.environ | environment,
    )


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
        [*COMMAND, "smollm2"],
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
