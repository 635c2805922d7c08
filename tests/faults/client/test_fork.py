"""One client for each process: one that was made before a fork works in the child, one that was used there does not."""

import subprocess
import sys

import pytest

from backend_client.testing import FakeFleet

IN_CHILD = """
import asyncio, os, sys, traceback
from backend_client import ConfigurationError, NPUClient, sync

url = sys.argv[1]

def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status

def refused(call):
    try:
        call()
    except ConfigurationError as error:
        assert "process" in str(error), error
    else:
        raise AssertionError("it was used in both processes")
"""

UNUSED = """
client = sync.NPUClient([url])

def work():
    assert len(client.embed("text")) == 8
    client.close()

child(work)
work()
"""

USED = """
client = sync.NPUClient([url])
question = [{"role": "user", "content": "Where?"}]
streams = [
    client.stream("prompt"),
    client.stream_chat(question),
    client.embed_stream([f"text {index}" for index in range(500)]),
]
begun = [next(stream) for stream in streams]

def work():
    refused(lambda: client.embed("text"))
    for stream in streams:
        refused(lambda: next(stream))
    client.close()

child(work)
tokens, chat, vectors = map(list, streams)
text = "The capital is Paris."
assert begun[0] + "".join(tokens) == text
assert begun[1].text + "".join(delta.text for delta in chat) == text
assert sum(len(batch.vectors) for batch in [begun[2], *vectors]) == 500
client.close()
"""

AWAITED = """
client = NPUClient([url])

async def forked_inside():
    await client.embed("text")
    loop = asyncio.get_running_loop()

    def work():
        asyncio.events._set_running_loop(None)
        refused(lambda: asyncio.run(client.embed("text")))

    child(work)

asyncio.run(forked_inside())
"""


@pytest.mark.parametrize("program", [UNUSED, USED, AWAITED], ids=["made before the fork", "used before it", "awaited"])
def test_a_client_belongs_to_the_process_that_uses_it_first(program):
    with FakeFleet(1) as fleet:
        done = subprocess.run(
            [sys.executable, "-c", IN_CHILD + program, fleet[0].url],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
