"""The dashboard's page in a real Chromium, shown states that no healthy node has: scripted, so that each can be had."""

import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.faults.served import served_in_thread
from worker_node.api.dashboard import page

pytest.importorskip("selenium", reason="NOT RUN: the dashboard's browser is driven by selenium; install '.[ops]'")

from tests.support.browser import chromium

HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
LONG = "an-organisation/a-model-with-a-very-long-name-that-no-column-was-made-for-" + "x" * 60
SIGNS = {
    "ready": ("good", "ready"),
    "unloaded": ("off", "not loaded"),
    "starting": ("warn", "loading"),
    "backing_off": ("bad", "down"),
    "quarantined": ("bad", "quarantined"),
    "failed": ("bad", "failed"),
    "stopped": ("bad", "stopped"),
}


def engine(state, device="NPU", reason="a reason", **fields):
    proof = {"age_s": 4000.0} if state == "ready" else None
    common = {"emulated": False, "prompt_limit": 1024, "total_limit": 1152, "pid": None, "restarts": 3}
    return {
        "device": device,
        "state": state,
        "reason": reason,
        "canary": proof,
        "retry_after_s": 12.5,
        **common,
        **fields,
    }


def model(name, *engines, state="degraded"):
    common = {"kind": "generation", "device": None, "queue_depth": 1234, "in_flight": 5678}
    return {
        "id": name,
        "state": state,
        "engines": list(engines),
        "compile": {"state": "done", "seconds": 212.4},
        **common,
    }


def failure(number):
    at = {"first": 1_700_000_000.0, "last": 1_700_000_000.0 - number * 1000}
    return {
        "code": "engine_unavailable",
        "status": 503,
        "route": "/v1/chat/completions",
        "model": LONG,
        "device": "NPU",
    } | {
        "count": 10**number,
        **at,
    }


def state_of(models, status="degraded"):
    series = [float(number % 40) for number in range(120)]
    names = ("requests", "prompt_tokens", "output_tokens", "texts", "in_flight", "queued")
    return {
        "kind": "node",
        "name": HOSTILE,
        "at": 1_700_000_000.0,
        "status": status,
        "version": "9.9.9",
        "uptime_s": 8_000_000.0,
        "devices": [
            {"name": "NPU", "available": True, "emulated": False, "full_name": "Intel(R) AI Boost", "driver": LONG}
        ],
        "models": models,
        "npu": {"busy_time_us": 5_000_000_000, "memory_bytes": 3 * 2**30, "frequency_mhz": 1400, "reasons": {}},
        "in_flight": 12_345,
        "requests": 123_456_789,
        "recent_requests": 98_765,
        "history": {"period_s": 1.0, "npu": [None, 0.5] * 60, **dict.fromkeys(names, series)},
        "first_token_ms": {"answers": 256, "window_s": 900.0, "p50": 12_345.6, "p95": 98_765.4},
        "routes": [{"model": HOSTILE, "device": "NPU", "reason": "context_exceeds_npu", "count": 1_000_000}],
        "failures": [failure(number) for number in range(8)],
    }


class ScriptedState:
    """A server of the real page whose state is whatever `state` is; None: it answers 500."""

    def __init__(self, state):
        self.state = state
        self.url = ""

    @asynccontextmanager
    async def running(self):
        async def told(_request):
            return web.Response(status=500) if self.state is None else web.json_response(self.state)

        app = web.Application()
        app.add_routes([page.routes()[0], web.get("/dashboard/state", told)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture
def browser(tmp_path):
    """A window of its own for each test."""
    with chromium(tmp_path / "profile") as running:
        yield running


def test_every_state_has_its_sign_its_word_and_its_reason(browser):
    models = [model(f"m-{state}", engine(state), state="ready" if state == "ready" else "degraded") for state in SIGNS]
    models.append(model("m-again", engine("starting", reason="starting again after: the engine process died")))
    with served_in_thread(ScriptedState(state_of(models))) as url:
        browser.open(url + "/dashboard")
        browser.wait("return document.querySelector('#models tbody tr')")
        for state, (level, word) in {**SIGNS, "again": ("bad", "restarting")}.items():
            row = f'#models tr[data-key="m-{state} NPU"]'
            mark = browser.run(
                "const mark = document.querySelector(arguments[0] + ' td[data-label=Engine] .mark');"
                "return [mark.className, mark.innerText, getComputedStyle(mark, '::before').content]",
                row,
            )
            assert mark[:2] == [f"mark {level}", word]
            assert mark[2].startswith({"good": '"●"', "off": '"○"', "warn": '"▲"', "bad": '"■"'}[level])
        problems = browser.text("#problems")
        for state in ("backing_off", "quarantined", "failed", "starting", "again"):
            assert f"m-{state} on NPU" in problems
        assert "a reason; next try in 13 s" in browser.text('#models tr[data-key="m-quarantined NPU"]')
        assert browser.run("return document.title").startswith("■ 6 · ")
        assert browser.leave() == []


def test_what_a_node_reports_stays_text_and_fits_at_every_width(browser):
    models = [
        model(HOSTILE, engine("ready"), engine("quarantined", "CPU", reason=HOSTILE)),
        model(LONG, engine("failed")),
    ]
    with served_in_thread(ScriptedState(state_of(models))) as url:
        browser.open(url + "/dashboard")
        browser.wait("return document.querySelector('#models tbody tr')")
        assert browser.text("#name") == HOSTILE
        assert HOSTILE in browser.text("#models")
        assert HOSTILE in browser.text("#routes")
        for width in (320, 400, 1024, 1200, 1280, 1600):
            browser.size(width, 900)
            assert browser.overflow() == 0, width
        assert browser.run("return [window.hit ?? null, document.images.length]") == [None, 0]
        assert browser.leave() == []


def test_a_node_that_stops_answering_is_not_shown_as_if_it_did(browser):
    scripted = ScriptedState(state_of([model("m", engine("ready"), state="ready")], status="ready"))
    with served_in_thread(scripted) as url:
        browser.open(url + "/dashboard")
        browser.wait("return document.title.startsWith('●')")
        scripted.state = None
        browser.wait("return document.getElementById('silence').checkVisibility()")
        assert "No answer since" in browser.text("#silence")
        assert browser.run("return document.title").startswith("■")
        assert browser.text("#freshness") == "not live"
        scripted.state = state_of([], status="ready")
        browser.wait("return document.title.startsWith('●')")
        assert not browser.run("return document.getElementById('silence').checkVisibility()")
        assert browser.text("#models") == "No model is configured."


def test_a_state_that_lacks_fields_shows_what_there_is(browser):
    """As from a node of another version, in a fleet that is being upgraded."""
    scripted = ScriptedState({"kind": "node", "name": "odd", "at": time.time(), "status": "ready"})
    with served_in_thread(scripted) as url:
        browser.open(url + "/dashboard")
        browser.wait("return document.getElementById('name').innerText === 'odd'")
        assert browser.text("#models") == "No model is configured."
        assert "NaN" not in browser.text("body")
        assert "undefined" not in browser.text("body")
        assert browser.leave() == []


@pytest.mark.parametrize(
    ("serving", "words"),
    [([True, False], "degraded: 1 of 2 models"), ([True, True, False], "degraded: 2 of 3 models")],
)
def test_a_degraded_node_says_how_many_of_its_models_serve(browser, serving, words):
    models = [
        model(f"m{number}", engine("ready" if serves else "quarantined"), state="ready" if serves else "unavailable")
        | {"device": "NPU" if serves else None}
        for number, serves in enumerate(serving)
    ]
    with served_in_thread(ScriptedState(state_of(models))) as url:
        browser.open(url + "/dashboard")
        browser.wait("return document.querySelector('#models tbody tr')")
        assert browser.text("#status") == words
        assert browser.leave() == []


def test_the_value_under_the_pointer_is_shown_with_its_age(browser):
    """The series of the scripted state has the value i % 40 in its place i of 120, a second apart."""
    with served_in_thread(ScriptedState(state_of([model("m", engine("ready"), state="ready")], status="ready"))) as url:
        browser.open(url + "/dashboard")
        browser.wait("return document.querySelector('[data-tile=texts] .spark .line')")
        browser.run("document.querySelector('[data-tile=texts]').scrollIntoView()")
        for place, words in ((99, "19.0 /s, 20 s ago"), (119, "39.0 /s, now"), (19, "19.0 /s, 1 min ago")):
            browser.point("[data-tile=texts] .spark", (place + 0.5) / 120)
            assert browser.text("#tip") == words
            assert browser.run("return document.getElementById('tip').checkVisibility()")
        browser.point("#name", 0.5)
        assert not browser.run("return document.getElementById('tip').checkVisibility()")
        assert browser.leave() == []
