"""Clients that were made, and used, before the process forked."""

import subprocess
import sys

from backend_client.testing import FakeFleet
from tests.faults.scripted_node import ScriptedNode
from tests.faults.served import served_in_thread

BLOCKING = """
import os, sys, traceback
from backend_client.sync import NPUClient

client = NPUClient([sys.argv[1]])
before = client.embed("text")
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if client.embed("text") == before else 2
        client.close()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert client.embed("text") == before
client.close()
"""

AWAITED = """
import asyncio, os, sys
from backend_client import NPUClient

client = NPUClient([sys.argv[1]])
before = asyncio.run(client.embed("text"))
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if asyncio.run(client.embed("text")) == before else 2
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
"""


STREAMING = """
import os, sys, traceback
from backend_client import ClientSettings, sync

client = sync.NPUClient([sys.argv[1]])
openai = sync.openai(ClientSettings(nodes=[sys.argv[1]]))
question = [{"role": "user", "content": "Where?"}]
streams = [
    client.stream("prompt"),
    client.stream_chat(question),
    client.embed_stream([f"text {index}" for index in range(500)]),
    openai.chat.completions.create(model="fake-writer", messages=question, stream=True),
]
begun = [next(stream) for stream in streams]
child = os.fork()
if child == 0:
    code = 1
    try:
        for stream in streams:
            try:
                next(stream)
            except Exception as error:
                assert "begun in the parent of this process" in str(error), error
            else:
                raise AssertionError("a stream was read in the child")
            stream.close()
        assert client.embed("text")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
tokens, chat, vectors, chunks = map(list, streams)
text = "The capital is Paris."
assert begun[0] + "".join(tokens) == text
assert begun[1].text + "".join(delta.text for delta in chat) == text
assert sum(len(batch.vectors) for batch in [begun[2], *vectors]) == 500
assert "".join(chunk.choices[0].delta.content or "" for chunk in [begun[3], *chunks] if chunk.choices) == text
client.close()
openai.close()
"""


def run_with_node(program):
    with served_in_thread(ScriptedNode()) as url:
        done = subprocess.run(
            [sys.executable, "-c", program, url], capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 0, done.stderr


def test_a_blocking_client_works_in_both_processes():
    run_with_node(BLOCKING)


def test_an_awaited_client_works_in_the_child():
    run_with_node(AWAITED)


def test_a_stream_is_read_in_the_process_that_began_it():
    with FakeFleet(1) as fleet:
        done = subprocess.run(
            [sys.executable, "-c", STREAMING, fleet[0].url], capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 0, done.stderr
