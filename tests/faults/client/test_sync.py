"""The blocking twins: from threads, beside a running loop, and at the end of the interpreter."""

import asyncio
import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from backend_client import sync
from backend_client.errors import ClientClosed
from tests.faults.scripted_node import ANSWER, ScriptedNode, served_in_thread, vectors_for


@pytest.fixture(scope="module")
def url():
    with served_in_thread(ScriptedNode()) as url:
        yield url


def test_the_methods_block_and_answer(url):
    with sync.NPUClient([url]) as client:
        assert np.float32(client.embed("text")).tolist() == vectors_for(["text"])[0].tolist()
        assert client.embed_result("text").source == "node"
        assert client.embed_many(["a", "b"]).shape == (2, 8)
        assert client.generate("prompt").text == "".join(ANSWER)
        stream = client.stream("prompt")
        assert list(stream) == ANSWER
        assert stream.result.text == "".join(ANSWER)
        assert client.health()[0].usable


def silent_node():
    """A node that never answers, and the semaphore that it releases with each request."""
    node, arrived = ScriptedNode(), threading.Semaphore(0)

    async def never(_request):
        arrived.release()
        await asyncio.get_running_loop().create_future()

    node.respond = never
    return node, arrived


def test_another_thread_may_close_a_stream_that_waits_for_its_next_piece():
    node, arrived = silent_node()
    with served_in_thread(node) as url, sync.NPUClient([url]) as client, ThreadPoolExecutor(1) as threads:
        stream = client.stream("prompt")
        reading = threads.submit(list, stream)
        assert arrived.acquire(timeout=30)
        stream.close()
        assert reading.result(timeout=30) == []
        assert stream.result is None


@pytest.mark.parametrize("kind", ["embed", "embed_many", "generate", "stream", "health"])
def test_closing_ends_the_calls_of_other_threads_at_once(kind):
    """Each waits for a node that never answers; none hangs, and all raise an error of the package."""
    node, arrived = silent_node()
    if kind == "health":
        node.health_respond = node.respond
    with served_in_thread(node) as url:
        client = sync.NPUClient([url])
        calls = {
            "embed": lambda: client.embed("text"),
            "embed_many": lambda: client.embed_many(["text"] * 1000),
            "generate": lambda: client.generate("prompt"),
            "stream": lambda: list(client.stream("prompt")),
            "health": client.health,
        }
        with ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(calls[kind]) for _ in range(4)]
            assert arrived.acquire(timeout=30)
            client.close()
            for call in waiting:
                with pytest.raises(ClientClosed):
                    call.result(timeout=30)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_a_callback_raises_reaches_the_caller_and_leaves_the_client_alive(url, kind):
    def progress(_done, _total):
        raise kind

    with sync.NPUClient([url]) as client:
        with pytest.raises(kind):
            client.embed_many(["a", "b"], progress=progress)
        assert len(client.embed("text")) == 8


def test_leaving_a_stream_of_vectors_ends_the_reading_of_its_texts(url):
    with sync.NPUClient([url]) as client:
        batches = client.embed_stream(itertools.repeat("text"))
        next(batches)
        reading = [thread for thread in threading.enumerate() if thread.name == "read texts"]
        assert reading
        batches.close()
        for thread in reading:
            thread.join(30)
            assert not thread.is_alive()


def test_a_client_that_is_freed_without_close_ends_its_thread(url):
    before = {*threading.enumerate()}
    client = sync.NPUClient([url])
    assert len(client.embed("text")) == 8
    assert next(iter(client.stream("prompt")))
    began = {*threading.enumerate()} - before
    assert began
    del client
    gc.collect()
    for thread in began:
        thread.join(30)
        assert not thread.is_alive()
