"""The recipes of the documents: each is Python, and each runs, in the framework that it is for."""

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from openai import OpenAI
from pyarrow import parquet

from backend_client import ConfigurationError
from backend_client.sync import InferenceClient as SyncInferenceClient
from tests.faults.scripted_node import ANSWER, ScriptedNode, answering, error_response, served_in_thread, vectors_for
from tests.support.later import Later

celery_testing = Later("celery.contrib.testing.worker")
celery_signals = Later("celery.signals")
starlette_testing = Later("starlette.testclient")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def block_of(page, text):
    """The one block of Python in a page that has this text."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    [found] = [block for block in blocks if text in block]
    return found


def run_example(name):
    """The names of an example, as they are when they are looked at."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


@pytest.fixture
def node(monkeypatch):
    """A scripted node in a thread of its own, which the settings name."""
    node = ScriptedNode()
    with served_in_thread(node) as url:
        monkeypatch.setenv("NPU_CLIENT_NODES", url)
        yield node


async def test_the_aiohttp_recipe_serves(scripted, monkeypatch, aiohttp_client):
    monkeypatch.setenv("NPU_CLIENT_NODES", scripted.url)
    http = await aiohttp_client(run_example("aiohttp_service.py")["app"])
    reply = await http.post("/embed", data="text")
    assert await reply.json() == vectors_for(["text"])[0].tolist()


def test_the_fastapi_recipe_serves_streams_and_refusals(node):
    with starlette_testing.TestClient(run_example("fastapi_service.py")["app"]) as http:
        reply = http.post("/answer", params={"prompt": "Where?"})
        assert (reply.status_code, reply.text) == (200, "".join(ANSWER))
        status = http.get("/healthz").json()
        assert (status["serving"], status["nodes"]) == (True, {node.url: "ready"})

        refusals = [
            (400, "invalid_request", 400, "the prompt cannot be answered"),
            (400, "context_length_exceeded", 413, "the prompt is too long"),
            (413, "payload_too_large", 413, "the prompt is too long"),
            (404, "model_not_found", 500, "internal error"),
            (500, "internal_error", 503, "try again later"),
        ]
        for status, code, shown, detail in refusals:

            async def refuse(_, status=status, code=code):
                return error_response(status, code, "what only operators may see")

            node.respond = refuse
            reply = http.post("/answer", params={"prompt": "Where?"})
            assert (reply.status_code, reply.json()) == (shown, {"detail": detail})

        node.respond = answering(lambda: error_response(429, "overloaded", "full", retry_after_ms=200_000))
        reply = http.post("/answer", params={"prompt": "Where?"})
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "200")
        assert reply.json() == {"detail": "try again later"}

    node.respond = answering(lambda: error_response(401, "invalid_api_key", "what only operators may see"))
    with starlette_testing.TestClient(run_example("fastapi_service.py")["app"]) as http:
        reply = http.post("/answer", params={"prompt": "Where?"})
        assert (reply.status_code, reply.json()) == (500, {"detail": "internal error"})


@pytest.mark.usefixtures("node")
def test_the_celery_recipe_works_off_tasks():
    names = run_example("celery_tasks.py")
    app = names["app"]
    app.conf.update(broker_url="memory://", result_backend="cache+memory://", worker_hijack_root_logger=False)
    with celery_testing.start_worker(app, pool="solo", perform_ping_check=False):
        rows = names["embed"].delay(["one", "two"]).get(timeout=30)
    np.testing.assert_array_equal(np.float32(rows), vectors_for(["one", "two"]))
    celery_signals.worker_process_shutdown.send(sender=None, pid=0, exitcode=0)
    with pytest.raises(ConfigurationError, match="closed"):
        names["client"].embed("text")


@pytest.fixture
def django():
    """Django's test client for the recipe, and the names that the recipe defines."""
    from django.conf import settings
    from django.test import Client, override_settings

    names = run_example("django_views.py")
    urls = types.ModuleType("recipe_urls")
    urls.urlpatterns = names["urlpatterns"]
    # The recipe's middleware is named as an importable class.
    sys.modules["recipe_urls"] = urls
    urls.InferenceErrors = names["InferenceErrors"]
    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"], USE_TZ=True)
    with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=["recipe_urls.InferenceErrors"]):
        yield Client(), names
    if names["inference"].cache_info().currsize:
        names["inference"]().close()
    del sys.modules["recipe_urls"]


def test_the_django_recipe_serves_streams_and_refusals(node, django):
    http, names = django
    reply = http.get("/vector", {"text": "one"})
    assert reply.json() == {"vector": vectors_for(["one"])[0].tolist(), "space": "space-a"}
    reply = http.get("/answer", {"prompt": "Where?"})
    assert (reply.status_code, b"".join(reply.streaming_content).decode()) == (200, "".join(ANSWER))
    # One client for all views, whatever thread they run in.
    assert names["inference"].cache_info().misses == 1
    for status, shown, detail in ((400, 400, "the request cannot be served"), (500, 503, "try again later")):

        async def refuse(_, status=status):
            return error_response(status, "invalid_request", "what only operators may see")

        node.respond = refuse
        for path, query in (("/vector", {"text": "one"}), ("/answer", {"prompt": "Where?"})):
            reply = http.get(path, query)
            assert (reply.status_code, reply.json()) == (shown, {"detail": detail})


def test_the_recipe_of_a_test_passes():
    names = {"__name__": "recipe"}
    exec(block_of("testing-your-service.md", "another_node_answers"), names)  # noqa: S102
    names["test_another_node_answers"]()


def test_the_script_recipe_prints(node, capsys):
    script = block_of("recipes.md", "Why is the sky blue?").replace("http://127.0.0.1:8081", node.url)
    exec(compile(script, "docs/recipes.md", "exec"), {"__name__": "recipe"})  # noqa: S102
    assert capsys.readouterr().out == "".join(ANSWER)


def test_the_scenarios_of_a_tested_fallback_pass():
    """In a process of its own, as its readers run it: more than 5 s."""
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "pytest_aiohttp.plugin", "-p", "no:cacheprovider")
    options = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "-W", "error")
    directory = EXAMPLES / "test_a_service"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            str(directory),
            *plugins,
            *options,
            str(directory),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "19 passed" in done.stdout


def test_the_index_of_the_example_keeps_to_one_space(node, monkeypatch):
    example = run_example("rag_index.py")
    with SyncInferenceClient.from_settings() as client:
        index = example["Index"].of(client, ["one", "two"])
        assert index.nearest(client, "two", count=1) == ["two"]
        assert example["answer"](client, index, "two") == "".join(ANSWER)
        index.space = "another-space"
        with pytest.raises(ValueError, match="the index has vectors of another-space, the query is of space-a"):
            index.nearest(client, "two")


@pytest.mark.usefixtures("node")
def test_the_data_set_of_the_example_has_every_row(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    parquet.write_table(pyarrow.table({"text": ["one", "two", "three"]}), source / "a.parquet")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "embed_dataset.py"), str(source), str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "3 rows in 1 of 1 fragments, 0 rejected\n"), done.stderr
    vectors = parquet.read_table(out).column("embeddings").to_pylist()
    np.testing.assert_array_equal(np.float32(vectors), vectors_for(["one", "two", "three"]))


def test_the_gateway_of_the_example_serves_both_teams(node, tmp_path):
    commands = Path(sys.executable).parent
    process = subprocess.Popen(
        ["sh", str(EXAMPLES / "gateway_for_two_teams.sh"), str(tmp_path)],
        env=os.environ | {"NODES": node.url, "PORT": "0", "PATH": f"{commands}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = iter(process.stdout.readline, "")
        keys, url = [], None
        for line in lines:
            keys += re.findall(r"\bnpugw_\S+", line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                url = found[0]
                break
        assert len(keys) == 2
        for key in keys:
            with OpenAI(base_url=f"{url}/v1", api_key=key) as openai:
                assert openai.models.list().data
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
