"""Event loops that end before the client does, closing at any moment, and forks: nothing is left, nobody warns."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from backend_client import ClientSettings, CloudClient, ConfigurationError, InferenceClient, NPUClient
from backend_client.errors import ClientClosed, StreamInterrupted
from backend_client.testing import FakeFleet
from tests.faults.client.strictly import run_strictly
from tests.faults.scripted_node import ScriptedCloud, served_in_thread

QUESTION = [{"role": "user", "content": "Where?"}]


@pytest.fixture
def client(fleet):
    return NPUClient([node.url for node in fleet])


@pytest.fixture
def cloud():
    scripted = ScriptedCloud()
    with served_in_thread(scripted) as url:
        yield url


def closes_down_to(descriptors):
    """Wait until no more are open; the nodes of this process close their ends in their own time."""
    until = time.monotonic() + 10
    while psutil.Process().num_fds() > descriptors:
        assert time.monotonic() < until
        time.sleep(0.005)


async def leave_a_stream(client):
    async with client.stream_chat(QUESTION) as stream:
        await anext(stream)


async def leave_a_call(client):
    calls = [asyncio.ensure_future(client.embed("text")) for _ in range(3)]
    await asyncio.sleep(0.01)
    return calls


@pytest.mark.parametrize("last", [lambda client: client.embed("text"), leave_a_stream, leave_a_call])
def test_a_client_ends_with_its_event_loop(client, fleet, caplog, last):
    held = psutil.Process().num_fds()
    asyncio.run(last(client))
    closes_down_to(held)
    assert not client.healthz().serving
    with pytest.raises(ClientClosed, match="its event loop ends"):
        asyncio.run(client.embed("text"))
    asyncio.run(client.close())
    # asyncio logs what aiohttp finds unclosed.
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


async def test_a_client_is_refused_in_another_loop(client):
    def elsewhere():
        with pytest.raises(ConfigurationError, match="belongs to another event loop"):
            asyncio.run(client.embed("text"))

    await client.embed("text")
    await asyncio.to_thread(elsewhere)
    await client.close()


def test_a_client_of_the_cloud_ends_with_its_event_loop(cloud):
    settings = ClientSettings(
        nodes=["http://127.0.0.1:9"], cloud={"base_url": cloud, "api_key": "k", "chat_model": "m"}
    )
    for client in (InferenceClient.from_settings(settings), CloudClient(settings.cloud)):
        held = psutil.Process().num_fds()
        assert asyncio.run(client.generate("prompt")).source == "cloud"
        closes_down_to(held)
        with pytest.raises(ClientClosed):
            asyncio.run(client.generate("prompt"))


STREAMS = {
    "stream": lambda client: client.stream("prompt"),
    "stream_chat": lambda client: client.stream_chat(QUESTION),
    "embed_stream": lambda client: client.embed_stream([f"text {index}" for index in range(1000)]),
}


@pytest.mark.parametrize("begin", STREAMS.values(), ids=STREAMS)
def test_a_stream_is_not_continued_in_another_loop(client, caplog, begin):
    async def following():
        return await anext(stream)

    async def close():
        await stream.aclose()

    stream = begin(client)
    assert asyncio.run(following())
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="begun in another event loop"):
            asyncio.run(following())
    asyncio.run(close())
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


LEFT_OPEN = """
import asyncio, backend_client, backend_client.sync
from backend_client import ClientSettings, NPUClient

asyncio.run(NPUClient(NODES).embed("text"))
kept = NPUClient(NODES)
asyncio.run(kept.embed("text"))
streaming, busy = NPUClient(NODES), NPUClient(NODES)

async def begin_a_stream():
    await anext(streaming.stream("prompt"))

async def begin_calls():
    calls = [asyncio.ensure_future(busy.embed("text")) for _ in range(3)]
    await calls[0]
    calls.append(asyncio.ensure_future(busy.chat([{"role": "user", "content": "x"}])))

asyncio.run(begin_a_stream())
asyncio.run(begin_calls())
sdk = backend_client.openai(ClientSettings(nodes=NODES))
blocking = backend_client.sync.openai(ClientSettings(nodes=NODES))
request = {"model": "fake-embedder", "input": "text"}
assert blocking.embeddings.create(**request).data == asyncio.run(sdk.embeddings.create(**request)).data
print("8")
"""


def test_an_interpreter_ends_in_silence_whatever_was_left_open(fleet):
    assert run_strictly(LEFT_OPEN.replace("NODES", str([node.url for node in fleet]))) == "8\n"


async def whole_stream(client):
    return [piece async for piece in client.stream("prompt")]


CALLS = {
    "embed": lambda client: client.embed("text"),
    "embed_many": lambda client: client.embed_many(["text"] * 200),
    "chat": lambda client: client.chat(QUESTION),
    "stream": whole_stream,
    "transcribe": lambda client: client.transcribe(b"RIFF" * 1000),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_client_may_be_closed_at_any_moment(fleet, call):
    before = asyncio.all_tasks()
    for turns in [*range(24), *range(24, 160, 8)]:
        client = NPUClient([node.url for node in fleet])
        task = asyncio.ensure_future(CALLS[call](client))
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await client.close()
            [outcome] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, ClientClosed | StreamInterrupted) or not isinstance(outcome, BaseException)
        assert asyncio.all_tasks() == before


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
