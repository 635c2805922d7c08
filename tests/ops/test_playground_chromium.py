"""The playground in a real Chromium: on a real node, and shown replies that a healthy node does not give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from tests.ops.scripted_page import HOSTILE, ScriptedState, engine, model, shown, state_of
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(900)]

# A page opened by touch leaves the focus alone, so that no keyboard covers it: headless Chromium counts as one.
SHOWN = "const field = document.getElementById('message'); field.focus(); return document.activeElement === field"
ANSWERED = "return !document.querySelector('.run.stop') && document.querySelector('#talk .model .about')?.innerText"
SPEECH = Path(__file__).parents[1] / "data" / "speech" / "0870.ogg"
PICTURE = Path(__file__).parents[2] / "docs" / "img" / "dashboard-phone.png"


def snippet(browser, language):
    browser.run("document.querySelector(`[data-language=${arguments[0]}]`).click()", language)
    return browser.text("#code")


def open_tab(browser, name):
    browser.run("document.getElementById(`tab-${arguments[0]}`).click()", name)


def test_a_chat_is_streamed_and_stopped_by_key_or_button_and_its_route_is_shown(browser, whole_node):
    browser.open(whole_node.url + "/play")
    browser.wait(SHOWN)
    browser.run("document.getElementById('max-tokens').value = 8")
    browser.press("Hello", "ENTER")
    about = browser.wait(ANSWERED)
    assert about.startswith("CPU · ")
    assert "tokens/s · first token" in about
    facts = browser.text("#facts-list")
    for words in ("the model's first placement", "First token", "tokens/s", " in, 8 out"):
        assert words in facts
    assert browser.text("#talk .model .words")
    browser.run("document.getElementById('max-tokens').value = 8000")
    for stop in (lambda: browser.press("ESCAPE"), lambda: browser.run("document.querySelector('.run.stop').click()")):
        browser.run("document.getElementById('again').click()")
        browser.wait(SHOWN)
        browser.press("Tell me a long story.", "ENTER")
        browser.wait("return document.querySelector('.writing .words')?.innerText.length > 20")
        assert browser.text("#chat .run") == "Stop"
        stop()
        browser.wait("return document.querySelector('#talk li:last-child .about').innerText.endsWith('stopped by you')")
    whole_node.wait_for(lambda body: all(model["in_flight"] == 0 for model in body["models"]))


def test_texts_are_compared_and_a_recording_is_transcribed(browser, whole_node):
    browser.open(whole_node.url + "/play")
    browser.wait(SHOWN)
    open_tab(browser, "embeddings")
    field = browser.driver.find_element("id", "texts")
    field.clear()
    field.send_keys("A cat sleeps.\nA kitten naps.\nStocks fell.")
    browser.run("document.querySelector('#embeddings .run').click()")
    rows = browser.wait(
        "return document.getElementById('similar') && [...document.querySelectorAll('#similar tbody tr')]"
        ".map(row => [...row.querySelectorAll('td')].map(cell => Number(cell.innerText)))"
    )
    assert [rows[index][index] for index in range(3)] == [1, 1, 1]
    assert rows[0][1] > rows[0][2] + 0.2
    tabs = browser.text("[role=tablist]")
    if "Transcribe" in tabs:
        open_tab(browser, "transcribe")
        browser.driver.find_element("id", "recording").send_keys(str(SPEECH))
        browser.run("document.querySelector('#transcribe .run').click()")
        assert len(browser.wait("return document.getElementById('heard').innerText")) > 20
    assert "Rerank" not in tabs
    assert "npu-node pull ms-marco-minilm" in browser.text("#absent")


def test_the_same_call_runs_as_it_is_copied_and_holds_no_key(browser):
    with start_node(NPU_NODE_API_KEYS="right-0123456789abcdef") as node:
        # Another spelling of /play, as in a crafted link: the shell that runs the snippet must not see its end.
        browser.open(node.url + "/pl%61y?;$(x)")
        browser.wait("return document.activeElement.id === 'key-field'")
        browser.press("wrong-key", "ENTER")
        browser.wait("return document.getElementById('key-refused').checkVisibility()")
        browser.press("right-0123456789abcdef", "ENTER")
        browser.wait(SHOWN)
        browser.press('It\'s "the" $HOME?')
        for task in ("chat", "embeddings"):
            open_tab(browser, task)
            for language, command in (("curl", ["sh", "-c"]), ("python", [sys.executable, "-c"])):
                code = snippet(browser, language)
                assert "YOUR_KEY" in code
                assert language == "python" or f" '{node.url}/v1/" in code.splitlines()[0]
                assert "right-0123456789abcdef" not in browser.run("return document.documentElement.outerHTML")
                done = subprocess.run(
                    [*command, code.replace("YOUR_KEY", "right-0123456789abcdef")],
                    capture_output=True, text=True, check=False, timeout=180, env=os.environ,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                assert '"error"' not in done.stdout
                assert len(done.stdout) > 10
        # The dashboard of the same tab has the key already.
        browser.open(node.url + "/dashboard")
        browser.wait("return document.querySelector('#verdict').innerText.startsWith('Serving 2 models on CPU')")
        assert all("401 (Unauthorized)" in message for message in browser.leave())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_fits_at_every_width_and_by_keyboard(browser, node, axe, scheme):
    browser.scheme(scheme)
    browser.open(node.url + "/play")
    browser.wait(SHOWN)
    for tab in ("Embeddings", "Chat"):
        browser.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
        browser.press("ARROW_RIGHT" if tab == "Embeddings" else "ARROW_LEFT")
        focused, outline = browser.focused()
        assert (focused, outline >= 2) == (f"tab-{tab.lower()}", True)
        browser.assert_accessible(axe, (375, 800, 1280))


class Scripted(ScriptedState):
    """A node that has one model, which sees, and answers a chat with `reply`: a coroutine function of the request."""

    def __init__(self, reply):
        super().__init__(state_of([model(HOSTILE, engine("ready"), state="ready")], status="ready"))
        self.routes = [web.get("/v1/models", self._models), web.post("/v1/chat/completions", reply)]

    async def _models(self, _request):
        return web.json_response({"data": [{"id": HOSTILE, "capabilities": ["completion", "vision"], "loaded": True}]})


def refused(status, code, message, **headers):
    async def reply(_request):
        body = {"error": {"code": code, "message": message}}
        return web.json_response(body, status=status, headers=headers)

    return reply


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refused(429, "overloaded", "the queue is full", **{"Retry-After": "7"}), "Try again in 7 s."),
        (refused(503, "engine_unavailable", HOSTILE), HOSTILE),
    ],
)
def test_a_refusal_is_shown_in_the_nodes_words_and_the_question_is_kept(browser, reply, words):
    with shown(browser, Scripted(reply), "/play", SHOWN, errors=["Failed to load resource"]):
        browser.press("A question", "ENTER")
        browser.wait("return document.getElementById('failure').checkVisibility()")
        assert words in browser.text("#failure")
        assert browser.run("return document.getElementById('message').value") == "A question"


def test_an_answer_stays_text_and_one_that_breaks_off_is_said_to(browser):
    async def reply(request):
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-NPU-Node-Device": HOSTILE[:20]})
        await stream.prepare(request)
        chunk = {"choices": [{"delta": {"content": HOSTILE}, "finish_reason": None}]}
        await stream.write(b"data: " + web.json_response(chunk).body + b"\n\n")
        return stream

    with shown(browser, Scripted(reply), "/play", SHOWN):
        browser.driver.find_element("id", "image").send_keys(str(PICTURE))
        browser.wait("return document.getElementById('attach').innerText === 'Remove the image'")
        assert "data:image/png" in snippet(browser, "curl")
        browser.run("document.getElementById('attach').click()")
        assert browser.text("#attach") == "Attach an image"
        assert "data:image/png" not in snippet(browser, "curl")
        browser.press("A question", "ENTER")
        browser.wait("return document.getElementById('failure').innerText.includes('The answer broke off')")
        assert browser.text("#talk .model .words") == HOSTILE
        assert browser.text("#talk .model .about").endswith("broke off")
        assert browser.run("return [window.hit ?? null, document.images.length]") == [None, 0]
