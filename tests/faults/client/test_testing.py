"""The test doubles that users of the package get."""

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from backend_client import NPUUnavailableError, RequestRejected
from backend_client.testing import FakeCloud, FakeFleet, drop, fake_vector, status


def test_vectors_depend_on_the_text_alone(fleet):
    with fleet.client() as client:
        vectors = client.embed_many(["one", "two", "one"])
    np.testing.assert_array_equal(vectors, [fake_vector("one"), fake_vector("two"), fake_vector("one")])
    assert fleet.assert_sent("/embeddings", times=1).body["texts"] == ["one", "two", "one"]
    # The same in every process, whatever the seed of its hashes.
    program = "from backend_client.testing import fake_vector; print(fake_vector('one').tolist())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(fake_vector("one").tolist())


def test_steps_are_taken_in_their_order(fleet):
    fleet[0].script(status(429, "overloaded", retry_after=0.01))
    fleet[1].script(None, drop())
    with fleet.client() as client:
        client.health()
        for _ in range(20):
            assert client.embed("text") == fake_vector("text").tolist()
    # Each of the two faults cost one request more.
    fleet.assert_sent("/embeddings", times=22)


async def test_a_route_that_a_fake_node_lacks_is_refused_as_nodes_do():
    with FakeFleet() as fleet:
        async with fleet.async_client() as client:
            with pytest.raises(RequestRejected, match="not_found"):
                await client.post("/v1/completions", {"prompt": "a"})


def test_a_killed_node_refuses_and_comes_back_on_its_port():
    with FakeFleet(1) as fleet, fleet.client() as client:
        url = fleet[0].url
        assert client.embed("text")
        for _ in range(2):
            fleet.kill(0)
        with pytest.raises(NPUUnavailableError):
            client.embed("text", timeout=2)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(url.rpartition(":")[2])))
        for _ in range(2):
            fleet.revive(0)
        assert fleet[0].url == url
        with pytest.raises(IndexError):
            fleet.kill(1)
        while not client.healthz().serving:
            client.health()
        assert client.embed("text", timeout=20)


def test_the_fake_cloud_answers_the_openai_sdk_and_reports_the_usage_it_was_given():
    with FakeCloud() as cloud, openai.OpenAI(api_key="k", base_url=cloud.url, max_retries=0) as sdk:
        vectors = sdk.embeddings.create(model="m", input=["one", "two"]).data
        np.testing.assert_array_equal([row.embedding for row in vectors], [fake_vector("one"), fake_vector("two")])
        chat = {"model": "m", "messages": [{"role": "user", "content": "Where?"}]}
        cloud.answer = lambda body: f"You said {body['messages'][0]['content']}"
        cloud.usage = (7, 3)
        whole = sdk.chat.completions.create(**chat)
        assert (whole.choices[0].message.content, whole.usage.total_tokens) == ("You said Where?", 10)
        for options, tokens in (({"stream_options": {"include_usage": True}}, [10]), ({}, [])):
            chunks = list(sdk.chat.completions.create(**chat, stream=True, **options))
            assert (
                "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "You said Where?"
            )
            assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == tokens
        cloud.usage = None
        assert sdk.chat.completions.create(**chat).usage is None
        cloud.script(status(402, "insufficient_quota"))
        with pytest.raises(openai.APIStatusError) as caught:
            sdk.chat.completions.create(**chat)
        assert (caught.value.status_code, caught.value.code) == (402, "insufficient_quota")
        with pytest.raises(openai.NotFoundError):
            sdk.models.list()


def test_the_plugin_gives_a_fixture(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["backend_client.testing.plugin"]\n')
    (tmp_path / "test_it.py").write_text(
        "from backend_client.sync import NPUClient\n\n\n"
        "def test_it(fake_fleet):\n"
        "    with NPUClient.from_settings() as client:\n"
        "        assert client.embed('text')\n"
        "    fake_fleet.assert_sent('/embeddings', texts=['text'])\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the plugins of this project's tests take seconds
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=alone)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_node_that_is_killed_while_clients_connect_leaves_nothing_open():
    """A connection that was left open would end this test with its warning."""
    done = threading.Event()

    def connect(port):
        while not done.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=10).close()

    with FakeFleet() as fleet, ThreadPoolExecutor(3) as pool:
        try:
            for _ in range(3):
                pool.submit(connect, int(fleet.urls[0].rpartition(":")[2]))
            for _ in range(30):
                fleet.kill(0)
                fleet.revive(0)
        finally:
            done.set()
    gc.collect()
