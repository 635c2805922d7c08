"""The dashboard in a real Chromium, on real nodes with real weights."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support.nodes import start_node
from tests.support.ports import free_port

pytest.importorskip("selenium", reason="NOT RUN: the dashboard's browser is driven by selenium; install '.[ops]'")

from tests.ops.browser import HANG_S
from tests.ops.calls import call

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(1500)]

EMBEDDER = '[{"name": "all-minilm-l6-v2"}]'
EMBEDDER_ROW = '#models tr[data-key="all-minilm-l6-v2 CPU"]'
ALL_GOOD = (
    "const rows = [...document.querySelectorAll('#models tbody tr')];"
    "return rows.length > 0 && !rows.some(row => row.matches('.bad, .warn'))"
)
WIDTHS = (400, 1280, 1600)
ALL_SERVE = (
    "const states = [...document.querySelectorAll('#nodes td[data-label=State] .mark')].map(mark => mark.innerText);"
    "return states.length === 3 && states.every(state => state === 'ready') && document.title.startsWith('●')"
)
# A killed node stays so until it is started again: its row, and what the head of the page says of it.
UNREACHABLE = """
const [url] = arguments, row = document.querySelector(`#nodes tr[data-key="${url}"]`);
const seen = {
  words: row.innerText, problems: document.querySelector("#problems").innerText,
  background: getComputedStyle(row.cells[0]).backgroundColor,
};
return row.className === "bad" && seen.words.includes("unreachable") && seen.problems.includes(url) && seen;
"""


def post(node, path, body):
    return call(node.url + path, body=body.encode())[0]


def some_work(node):
    """A few requests of each kind, good and bad, so that there is something to show."""
    for number in range(3):
        assert post(node, "/embeddings", f'{{"texts": ["a {number}", "b {number}", "c"]}}') == 200
        assert post(node, "/inference", f'{{"prompt": "Count to {number + 3}.", "max_new_tokens": 24}}') == 200
    assert post(node, "/v1/embeddings", '{"input": "a", "model": "not-here"}') == 404
    assert post(node, "/inference", '{"prompt": 1}') == 400


def kill_until_red(browser, node, model):
    """Kill the model's engine; again if the page, or the node, did not run for so long that none was seen dead.

    Each kill has the engine wait longer before it starts again.
    """
    while True:
        os.kill(node.engine_pids()[model], signal.SIGKILL)
        with contextlib.suppress(AssertionError):
            return browser.wait("return window.recorded.some(seen => seen.level === 'bad')", timeout=10)
        node.wait_for(lambda body: body["status"] == "ready")


def is_red(colour):
    """Whether `rgb(r, g, b)` is a tint of red, light or dark."""
    red, green, blue = (float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return red > green + 15 and red > blue + 15


def test_a_killed_engine_is_red_and_green_when_it_is_back(browser):
    with start_node() as node:
        some_work(node)
        browser.open(node.url + "/dashboard")
        browser.wait(ALL_GOOD)
        browser.wait("return document.querySelectorAll('.spark .line').length > 4")
        browser.size(1280, 900)
        browser.record('#models tr[data-key="smollm2-135m-instruct CPU"]')
        pid = node.engine_pids()["smollm2-135m-instruct"]
        kill_until_red(browser, node, "smollm2-135m-instruct")
        browser.size(1280, 900)
        browser.wait("return window.recorded.at(-1).level === 'good'")
        before, red, *_, green = browser.recorded()
        log = browser.text("#log")
        assert browser.leave() == []
        assert before["level"] == "good"
        assert not is_red(before["background"])
        assert red["level"] == "bad"
        assert is_red(red["background"])
        assert red["title"].startswith("■ 1 · ")
        assert "smollm2-135m-instruct on CPU" in red["problems"]
        assert "the engine process " in red["words"], "died, and when the cause is known: was killed from outside"
        assert green["title"].startswith("● ")
        assert re.search(r"restarted (once|\d+ times)", green["words"])
        assert f"pid {pid}" not in green["words"]
        assert "smollm2-135m-instruct on CPU: ready → " in log
        assert re.search(r"smollm2-135m-instruct on CPU: \w+ → ready", log), "which states between were seen is chance"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_in_both_schemes_and_at_every_width(browser, node, axe, scheme):
    some_work(node)
    browser.scheme(scheme)
    browser.open(node.url + "/dashboard")
    browser.wait(ALL_GOOD)
    browser.assert_accessible(axe, WIDTHS)
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 200) == (scheme == "dark")


def test_the_theme_is_chosen_by_the_button_and_remembered(browser, node):
    paper = "return getComputedStyle(document.body).backgroundColor"
    browser.open(node.url + "/dashboard")
    light = browser.run(paper)
    browser.run("document.getElementById('theme').click()")
    dark = browser.run(paper)
    assert dark != light
    assert browser.text("#theme") == "Theme: dark"
    browser.open(node.url + "/dashboard")
    assert browser.run(paper) == dark


def test_the_whole_page_is_reached_by_keyboard_and_the_focus_is_seen(browser, node):
    browser.open(node.url + "/dashboard")
    browser.wait(ALL_GOOD)
    browser.press("TAB")
    assert browser.focused()[0] == "Skip to the content"
    browser.press("ENTER")
    browser.wait("return document.activeElement.id === 'main'")
    browser.open(node.url + "/dashboard")
    browser.wait(ALL_GOOD)
    browser.press("TAB")
    for name in ("Dashboard", "to-play", "pause", "theme"):
        browser.press("TAB")
        focused, outline = browser.focused()
        assert focused == name
        assert outline >= 2
    browser.press("SPACE")
    assert browser.text("#theme") == "Theme: dark"
    browser.run("document.getElementById('pause').focus()")
    browser.press("ENTER")
    assert browser.run("return document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    assert browser.text("#freshness").startswith("paused at")
    browser.press("ENTER")
    browser.wait("return document.getElementById('freshness').innerText.startsWith('live')")


def test_an_emulated_npu_is_called_so_wherever_it_is_shown(browser, axe):
    models = '[{"name": "all-minilm-l6-v2", "npu_buckets": [32], "placements": ["NPU", "CPU"]}]'
    with start_node(NPU_NODE_NPU_EMULATION="1", NPU_NODE_MODELS=models) as node:
        for number in range(20):
            assert post(node, "/embeddings", f'{{"texts": ["{number}"]}}') == 200
        browser.open(node.url + "/dashboard")
        browser.wait("return document.querySelector('#routes tbody tr')")
        assert "The NPU of this node is emulated" in browser.text("#emulation")
        for place in ('#tiles [data-tile="npu"]', '#models tr[data-key="all-minilm-l6-v2 NPU"]', "#devices tbody tr"):
            browser.wait("return document.querySelector(arguments[0])?.innerText.includes('EMULATED')", place)
        assert "EMULATED" not in browser.text(EMBEDDER_ROW)
        assert browser.violations(axe) == []
        assert browser.leave() == []


@contextlib.contextmanager
def fleet_dashboard(nodes):
    """`npu-client dashboard`, as a user starts it; the URL of its page."""
    command = [sys.executable, "-m", "backend_client"]
    for node in nodes:
        command += ["--node", node.url]
    process = subprocess.Popen([*command, "dashboard"], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("the dashboard is at http://127.0.0.1:"), line
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(HANG_S)
        process.stdout.close()


def test_the_fleet_shows_a_killed_node_as_red_and_green_when_it_is_back(browser, axe):
    port = free_port()
    with contextlib.ExitStack() as stack:
        ports = ("0", str(port), "0")
        nodes = [stack.enter_context(start_node("--port", port, NPU_NODE_MODELS=EMBEDDER)) for port in ports]
        url = stack.enter_context(fleet_dashboard(nodes))
        for number in range(6):
            assert post(nodes[number % 2], "/embeddings", f'{{"texts": ["{number}"]}}') == 200
        browser.open(url)
        browser.wait(ALL_SERVE)
        browser.wait("return document.querySelector('#nodes').innerText.match(/50 %/g)?.length === 2")
        assert browser.text("#verdict").startswith("All of 3 nodes serve")
        assert browser.text("#nodes").count("available") == 3
        assert browser.violations(axe) == []

        # By keyboard to the second node: its inside is shown, and the focus goes there.
        browser.size(1600, 900)
        browser.run("document.querySelectorAll('#nodes a')[0].focus()")
        browser.press("TAB", "ENTER")
        browser.wait("return document.activeElement.id === 'node-heading'")
        assert browser.text("#node-heading") == f"Node {nodes[1].url}"

        browser.wait(ALL_SERVE)
        nodes[1].process.kill()
        nodes[1].process.wait()
        red = browser.wait(UNREACHABLE, nodes[1].url)
        assert is_red(red["background"])
        assert "since" in red["words"]
        assert browser.text("#verdict").startswith("2 of 3 nodes serve")
        browser.wait("return document.getElementById('no-detail').checkVisibility()")
        assert browser.violations(axe) == []
        browser.scheme("dark")
        browser.size(400, 900)
        assert browser.overflow() == 0
        browser.scheme("light")
        browser.size(1600, 900)
        with start_node("--port", str(port), NPU_NODE_MODELS=EMBEDDER):
            browser.wait(ALL_SERVE)
            assert browser.leave() == []
