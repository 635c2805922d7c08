"""The dashboard's page in a real Chromium, shown states that no healthy node has."""

import time

import pytest
from aiohttp import web

from tests.ops.scripted_page import HOSTILE, LONG, ScriptedState, engine, model, shown, state_of

# A limit for a hang: each test takes two seconds.
pytestmark = pytest.mark.timeout(600)

SIGNS = {
    "ready": ("good", "ready"),
    "unloaded": ("off", "not loaded"),
    "starting": ("warn", "loading"),
    "backing_off": ("bad", "down"),
    "quarantined": ("bad", "quarantined"),
    "failed": ("bad", "failed"),
    "stopped": ("bad", "stopped"),
}


def test_every_state_has_its_sign_its_word_and_its_reason(browser):
    models = [model(f"m-{state}", engine(state), state="ready" if state == "ready" else "degraded") for state in SIGNS]
    models.append(model("m-again", engine("starting", reason="starting again after: the engine process died")))
    with shown(browser, ScriptedState(state_of(models))):
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
        browser.wait("return document.title.startsWith('■ 6 · ')")


def test_what_a_node_reports_stays_text_and_fits_at_every_width(browser):
    models = [
        model(HOSTILE, engine("ready"), engine("quarantined", "CPU", reason=HOSTILE)),
        model(LONG, engine("failed")),
    ]
    with shown(browser, ScriptedState(state_of(models))):
        assert browser.text("#name") == HOSTILE
        assert HOSTILE in browser.text("#models")
        assert HOSTILE in browser.text("#routes")
        for width in (320, 400, 1024, 1200, 1280, 1600):
            browser.size(width, 900)
            assert browser.overflow() == 0, width
        assert browser.run("return [window.hit ?? null, document.images.length]") == [None, 0]


def test_a_node_that_stops_answering_is_not_shown_as_if_it_did(browser):
    scripted = ScriptedState(state_of([model("m", engine("ready"), state="ready")], status="ready"))
    with shown(browser, scripted, until="return document.title.startsWith('●')", errors=["500"]):
        scripted.state = None
        browser.wait(
            "const silence = document.getElementById('silence');"
            "return silence.checkVisibility() && silence.innerText.includes('No answer since')"
            " && document.title.startsWith('■') && document.getElementById('freshness').innerText === 'not live'"
        )
        scripted.state = state_of([], status="ready")
        browser.wait(
            "return document.title.startsWith('●') && !document.getElementById('silence').checkVisibility()"
            " && document.getElementById('models').innerText === 'No model is configured.'"
        )


def test_a_state_that_lacks_fields_shows_what_there_is(browser):
    """As from a node of another version, in a fleet that is being upgraded."""
    scripted = ScriptedState({"kind": "node", "name": "odd", "at": time.time(), "status": "ready"})
    with shown(browser, scripted, until="return document.getElementById('name').innerText === 'odd'"):
        assert browser.text("#models") == "No model is configured."
        assert "NaN" not in browser.text("body")
        assert "undefined" not in browser.text("body")


@pytest.mark.parametrize(
    ("serving", "words"),
    [
        ([True, False], "Degraded: serving 1 of 2 models on NPU"),
        ([True, True, False], "Degraded: serving 2 of 3 models on NPU"),
        ([True], "Serving 1 model on NPU"),
        ([], "Nothing loaded: no model is configured"),
    ],
)
def test_one_line_says_what_serves_and_where(browser, serving, words):
    models = [
        model(f"m{number}", engine("ready" if serves else "quarantined"), state="ready" if serves else "unavailable")
        | {"device": "NPU" if serves else None}
        for number, serves in enumerate(serving)
    ]
    scripted = ScriptedState(state_of(models, "ready" if all(serving) else "degraded"))
    with shown(browser, scripted, until="return document.querySelector('#verdict .mark')"):
        assert browser.text("#verdict") == words


FAULTS_SHOWN = "return document.getElementById('faults').checkVisibility()"
FAULTS = ["garbage device=NPU beyond_tokens=500", HOSTILE]
MADE = "2026-09-01T10:00:00+00:00"
# The level, the word and what is said of why, by what a node says.
CERTIFIED = {
    "certified": ("good", "certified", f"at {MADE}, against stored", "at 2026-09-01, against stored"),
    "limited": ("warn", "limited to 480 tokens", f"at {MADE}", "at 2026-09-01"),
    "expired": ("warn", "expired", f"the driver changed since {MADE}", "the driver changed since 2026-09-01"),
    "failed": ("bad", "failed", f"at {MADE}: canary", "at 2026-09-01: canary"),
}


def certified(state, reason=None, **more):
    limit = 480 if state == "limited" else None
    return {"certified": state, "certified_reason": reason, "certified_limit": limit, **more}


def test_each_device_says_how_it_was_certified_and_only_a_loss_needs_attention(browser):
    models = []
    for state, (_, _, reason, _) in CERTIFIED.items():
        passport = certified(state, reason, emulated=True)
        never = engine("ready", "CPU", **certified("not certified", "npu-node certify has not been run for it"))
        if state == "failed":  # its device is not used
            excluded = {"device": "NPU", "reason": f"its certification failed {reason}", **passport}
            models.append(model(f"m-{state}", never, state="ready") | {"excluded": [excluded]})
        else:
            models.append(model(f"m-{state}", engine("ready", **passport), never, state="ready"))
    with shown(browser, ScriptedState(state_of(models, "ready"))):
        cell = 'return document.querySelector(`#models tr[data-key="${arguments[0]}"] td[data-label=Certified]`)'
        for state, (level, word, _, why) in CERTIFIED.items():
            mark = browser.run(cell + ".querySelector('.mark').className", f"m-{state} NPU")
            words = browser.run(cell + ".innerText", f"m-{state} NPU").split()
            assert mark == f"mark {level}"
            assert " ".join(words) == f"{word} EMULATED {why}"
            assert browser.run(cell + ".querySelector('.mark')", f"m-{state} CPU") is None
            assert browser.run(cell + ".innerText", f"m-{state} CPU").strip() == "not certified"
        assert "not used" in browser.text('#models tr[data-key="m-failed NPU"]')
        problems = browser.text("#problems")
        assert "m-expired on NPU: certification expired" in problems
        assert "m-failed on NPU: not used" in problems
        assert "m-certified" not in problems
        assert "m-limited" not in problems
        assert "CPU" not in problems
        browser.wait("return document.title.startsWith('▲ 2 · ')")


def test_a_model_that_no_device_may_run_is_shown_and_red(browser):
    excluded = [{"device": "NPU", "emulated": False, "reason": "too big", **certified("not certified")}]
    gone = model("gone", state="failed") | {"kind": None, "reason": "its weights are missing", "queue_depth": 0}
    models = [gone | {"id": "barred", "reason": "no placement", "excluded": excluded}, gone]
    with shown(browser, ScriptedState(state_of(models, "failed"))):
        rows = browser.run(
            "return [...document.querySelectorAll('#models tbody tr')].map(r => [r.className, r.innerText])"
        )
        assert [level for level, _ in rows] == ["bad", "bad"]
        assert "too big" in rows[0][1]
        assert "its weights are missing" in rows[1][1]
        assert "barred: not serving" in browser.text("#problems")
        assert "undefined" not in browser.text("body")
        assert "null" not in browser.text("#models")


@pytest.mark.parametrize("fleet", [False, True])
def test_faults_on_demand_are_a_banner_and_stay_text(browser, fleet):
    node = state_of([model("m", engine("ready"), state="ready")], "ready") | {"faults": FAULTS}
    state, name = node, "This node"
    if fleet:
        name = "http://10.0.0.1:8081"
        row = {"url": name, "status": "ready", "usable": True, "breaker": "closed", "trouble": None, "state": node}
        state = {"kind": "fleet", "at": node["at"], "version": "1", "nodes": [row]}
    scripted = ScriptedState(state)
    with shown(browser, scripted, until=FAULTS_SHOWN):
        banner = browser.text("#faults")
        assert banner.startswith(f"{name} has faults on demand: {FAULTS[0]}; ")
        assert HOSTILE in banner
        assert browser.run("return window.hit ?? null") is None
        scripted.state = state | {"faults": []} if not fleet else state | {"nodes": []}
        browser.wait("return !document.getElementById('faults').checkVisibility()")


def test_the_playground_has_the_banner_too_and_names_the_faults_of_an_answer(browser):
    async def models(_request):
        row = {"id": "m", "object": "model", "kind": "embedding", "capabilities": ["embedding"], "loaded": True}
        return web.json_response({"object": "list", "data": [row]})

    async def embeddings(_request):
        headers = {"X-NPU-Node-Device": "NPU", "X-NPU-Node-Faults": "2"}
        rows = [{"index": index, "embedding": [1.0, 0.0]} for index in range(4)]
        return web.json_response({"data": rows, "usage": {"prompt_tokens": 1}}, headers=headers)

    scripted = ScriptedState(state_of([model("m", engine("ready"), state="ready")], "ready") | {"faults": FAULTS})
    scripted.routes = [web.get("/v1/models", models), web.post("/v1/embeddings", embeddings)]
    with shown(browser, scripted, "/play", until=FAULTS_SHOWN):
        assert browser.text("#faults").startswith("This node has faults on demand: garbage")
        browser.run("document.querySelector('#embeddings .run').click()")
        browser.wait("return document.getElementById('facts-list').innerText.includes('Faults on demand')")
