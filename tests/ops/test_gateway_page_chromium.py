"""The gateway's pages in a real Chromium, before two scripted nodes of which one says hostile things."""

import json
from contextlib import ExitStack

import pytest
from aiohttp import web

from backend_client.gateway.keys import KeyStore
from backend_client.testing.node import EMBEDDER, WRITER, route_headers
from tests.faults.scripted_node import ScriptedNode, answering, served_in_thread, vectors_for
from tests.ops.scripted_page import HOSTILE, engine, model, state_of
from tests.support.gateway import start_gateway

pytestmark = [pytest.mark.timeout(900)]

READY = "return [...document.querySelectorAll('#nodes tbody tr')].filter(row => row.innerText.includes('ready')).length"
ASKED = "return document.activeElement.id === 'key-field' && document.querySelector('#key').checkVisibility()"
ANSWERED = "return !document.querySelector('.run.stop') && document.querySelector('#talk .model .about')?.innerText"
CLICK = "document.querySelector(arguments[0]).click()"


def told(name):
    models = [
        model(EMBEDDER, engine("ready", "CPU"), state="ready"),
        model(WRITER, engine("ready", "CPU"), state="ready"),
    ]
    for one in models:
        one["device"] = "CPU"
    return state_of(models, status="ready") | {"name": name, "grafana": "javascript:window.hit=1"}


async def embed(request):
    """Fake nodes have no /v1/embeddings."""
    if request.path != "/v1/embeddings":
        return None
    rows = vectors_for((await request.json())["input"]).tolist()
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    body = {"object": "list", "model": EMBEDDER, "data": data, "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    return web.json_response(body, headers={**route_headers(EMBEDDER), "X-Space": "space-a"})


@pytest.fixture
def nodes():
    with ExitStack() as stack:
        urls = []
        for name in ("node-one", HOSTILE):
            state = answering(lambda name=name: web.json_response(told(name)))
            node = ScriptedNode(routes=[web.get("/dashboard/state", state)])
            node.respond = embed
            if name == HOSTILE:
                node.offer("generation", HOSTILE)
            urls.append(stack.enter_context(served_in_thread(node)))
        yield urls


def ask(browser, text):
    browser.run("document.getElementById('message').focus()")
    browser.press(text, "ENTER")
    return browser.wait(ANSWERED)


def test_both_nodes_are_shown_and_a_chat_goes_through(browser, nodes):
    with start_gateway(*nodes) as url:
        browser.open(url + "/dashboard")
        browser.wait(READY + " === 2")
        shown = browser.text("#nodes")
        assert all(node.removeprefix("http://") in shown for node in nodes)
        assert "All of 2 nodes serve" in browser.text("#verdict")
        assert "Shown by\nnpu-gateway" in browser.text("#facts")
        for node in nodes:
            browser.run("location.hash = arguments[0]", f"#{node}")
            heading = "return document.getElementById('node-heading').innerText === arguments[0]"
            browser.wait(heading, f"Node {node}")
            assert WRITER in browser.text("#models")
        assert "Grafana" not in browser.text("#links")
        browser.run(CLICK, "#to-play")
        browser.wait("return document.querySelector('[role=tab]') && document.getElementById('model').value")
        assert HOSTILE in browser.text("#model")
        browser.run("document.getElementById('model').value = arguments[0]", WRITER)
        assert ask(browser, "Hello").startswith("CPU · ")
        assert browser.text("#talk .model .words") == "The capital is Paris."
        facts = browser.text("#facts-list")
        assert any(node.removeprefix("http://") in facts for node in nodes)
        browser.run(CLICK, "#tab-embeddings")
        browser.run(CLICK, "#embeddings .run")
        browser.wait("return document.getElementById('similar')")
        assert "Space\nspace-a" in browser.wait("return document.getElementById('facts-list').innerText")
        browser.run(CLICK, "nav a")
        browser.wait("return document.querySelector('#teams tbody td[data-label=Requests]')?.innerText > 0")
        assert "anybody" in browser.text("#teams")
        assert browser.run("return window.hit ?? document.querySelector('main img, main script')") is None
        assert browser.leave() == []


def test_the_key_is_asked_for_kept_in_memory_and_shows_its_own_team(browser, nodes, tmp_path):
    store = KeyStore(tmp_path / "keys.db")
    key = store.add("ours", [WRITER, EMBEDDER], cloud=False, requests=600)
    store.add("others")
    with start_gateway(*nodes, NPU_GATEWAY_KEYS=str(tmp_path / "keys.db")) as url:
        browser.open(url + "/dashboard")
        browser.wait(ASKED)
        assert "This gateway asks for an API key" in browser.text("#key")
        browser.press("npugw_wrong", "ENTER")
        browser.wait("return document.getElementById('key-refused').checkVisibility()")
        browser.press(key, "ENTER")
        browser.wait(READY + " === 2")
        (row,) = browser.run("return [...document.querySelectorAll('#teams tbody tr')].map(row => row.innerText)")
        assert all(words in row for words in ("ours", "yours", key.split("_")[1], WRITER, "nodes only", "600 requests"))
        assert all("401 (Unauthorized)" in message for message in browser.errors())
        first = browser.driver.current_window_handle
        browser.run(CLICK, "#to-play")
        browser.wait("return true")
        (second,) = set(browser.driver.window_handles) - {first}
        browser.driver.switch_to.window(second)
        # The page that was opened from the other has its key; the models are those of the key.
        browser.wait("return document.getElementById('model')?.value")
        assert HOSTILE not in browser.text("#model")
        assert ask(browser, "Hello")
        assert browser.run("return JSON.stringify([sessionStorage, localStorage, document.cookie])").find("npugw_") < 0
        assert key not in browser.run("return document.documentElement.outerHTML")
        assert browser.leave() == []
        browser.driver.close()
        browser.driver.switch_to.window(first)
        browser.driver.refresh()
        browser.wait(ASKED)
        assert all("401 (Unauthorized)" in message for message in browser.leave())
    store.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_fits_at_every_width(browser, nodes, axe, scheme):
    browser.scheme(scheme)
    with start_gateway(*nodes) as url:
        for path, shown in (
            ("/dashboard", READY + " === 2"),
            ("/play", "return document.getElementById('model').value"),
        ):
            browser.open(url + path)
            browser.wait(shown)
            browser.assert_accessible(axe, (375, 800, 1280))
        assert browser.leave() == []


def test_the_python_of_a_ranking_names_no_node(browser, nodes):
    """It is a call of OpenAI's SDK: the gateway has no /health of a node, which npu-node's client asks."""
    with start_gateway(*nodes) as url:
        browser.open(url + "/play")
        browser.wait("return document.getElementById('model').value")
        browser.run("task = 'rerank'; language = 'python'; renderCode()")
        code = browser.text("#code")
        assert json.dumps(f"{url}/v1") in code
        assert "NPUClient" not in code
        compile(code, "snippet", "exec")
        assert browser.leave() == []
