"""The recipes of the documents: each is Python, and each runs, in the framework that it is for."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from backend_client import ConfigurationError
from tests.faults.scripted_node import ANSWER, ScriptedNode, answering, error_response, served_in_thread, vectors_for
from tests.support.later import Later

celery_testing = Later("celery.contrib.testing.worker")
celery_signals = Later("celery.signals")
starlette_testing = Later("starlette.testclient")

DOCS = Path(__file__).parents[3] / "docs"
TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("recipes.md", "testing-your-service.md"))
PAGE_FILES = ["by_hand.py", "service.py", "service_fastapi.py", "conftest.py", "test_fallback.py"]
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def block_with(text):
    [found] = [block for block in BLOCKS if text in block]
    return found


def run_recipe(text):
    names = {"__name__": "recipe"}
    exec(compile(block_with(text), "docs/recipes.md", "exec"), names)  # noqa: S102
    return names


@pytest.fixture
def node(monkeypatch):
    """A scripted node in a thread of its own, which the settings name."""
    node = ScriptedNode()
    with served_in_thread(node) as url:
        monkeypatch.setenv("NPU_CLIENT_NODES", url)
        yield node


async def test_the_aiohttp_recipe_serves(scripted, monkeypatch, aiohttp_client):
    monkeypatch.setenv("NPU_CLIENT_NODES", scripted.url)
    http = await aiohttp_client(run_recipe("cleanup_ctx")["app"])
    reply = await http.post("/embed", data="text")
    assert await reply.json() == vectors_for(["text"])[0].tolist()


def test_the_fastapi_recipe_serves_streams_and_refusals(node):
    with starlette_testing.TestClient(run_recipe("FastAPI")["app"]) as http:
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
    with starlette_testing.TestClient(run_recipe("FastAPI")["app"]) as http:
        reply = http.post("/answer", params={"prompt": "Where?"})
        assert (reply.status_code, reply.json()) == (500, {"detail": "internal error"})


@pytest.mark.usefixtures("node")
def test_the_celery_recipe_works_off_tasks():
    names = run_recipe("Celery")
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

    names = run_recipe("django")
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
    run_recipe("another_node_answers")["test_another_node_answers"]()


def test_the_script_recipe_prints(node, capsys):
    script = block_with("Why is the sky blue?").replace("http://127.0.0.1:8081", node.url)
    exec(compile(script, "docs/recipes.md", "exec"), {"__name__": "recipe"})  # noqa: S102
    assert capsys.readouterr().out == "".join(ANSWER)


def test_the_scenarios_of_a_tested_fallback_pass(tmp_path):
    """The page as files, in a process of its own as its readers run it: more than 5 s."""
    page = (DOCS / "test-your-fallback.md").read_text(encoding="utf-8")
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == PAGE_FILES
    for name, block in files:
        (tmp_path / name).write_text(block)
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "pytest_aiohttp.plugin", "-p", "no:cacheprovider")
    options = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "-W", "error")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *options, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "19 passed" in done.stdout
