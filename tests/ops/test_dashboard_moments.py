"""The dashboard's page in a real Chromium: what it shows does not depend on when, or in what order, it was answered."""

import asyncio
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web

from tests.faults.scripted_node import served_in_thread
from tests.ops.calls import eventually
from tests.ops.scripted_page import ScriptedState, engine, model, state_of

# A limit for a hang: each test takes two seconds.
pytestmark = pytest.mark.timeout(600)

HANG_S = 100
KEY_FIELD = "return document.activeElement.id === 'key-field'"
LIVE = "return document.title.startsWith('●')"


def healthy(**fields):
    return state_of([model("m", engine("ready"), state="ready")], status="ready") | fields


class Looks:
    """Counts what the page asks, and holds answers back until the test releases them."""

    def __init__(self):
        self.count = 0
        self.held, self._released = threading.Event(), threading.Event()

    def look(self):
        """Called for each request; its number, from 1."""
        self.count += 1
        return self.count

    async def hold(self):
        self.held.set()
        await asyncio.to_thread(self._released.wait, HANG_S)

    def release(self):
        self._released.set()


@contextmanager
def shown(browser, scripted, looks):
    with served_in_thread(scripted) as url:
        try:
            browser.open(url + "/dashboard")
            yield
            browser.leave()
        finally:
            looks.release()


def test_a_key_is_kept_in_this_tab_until_it_is_forgotten_also_when_the_refusal_of_no_key_comes_late(browser):
    looks = Looks()

    async def respond(request):
        number = looks.look()
        if request.headers.get("Authorization") == "Bearer right":
            return web.json_response(healthy())
        if number == 2:
            await looks.hold()
        return web.Response(status=401)

    with shown(browser, ScriptedState(None, respond), looks):
        browser.wait(KEY_FIELD)
        assert looks.held.wait(HANG_S)
        browser.press("right", "ENTER")
        looks.release()
        browser.wait(LIVE)
        assert browser.run("return Object.values(sessionStorage)") == ["right"]
        browser.run("document.getElementById('forget').click()")
        browser.wait(KEY_FIELD)
        assert not browser.run("return document.getElementById('content').checkVisibility()")


def test_an_answer_that_a_later_one_overtook_is_not_shown(browser):
    """A choice of another range asks at once, beside the look of this second."""
    looks = Looks()

    async def respond(_request):
        if looks.look() == 2:
            await looks.hold()
            return web.json_response(healthy(status="draining"))
        return web.json_response(healthy())

    async def look_back(_request):
        return web.json_response(healthy()["history"])

    with shown(browser, ScriptedState(None, respond, look_back), looks):
        browser.wait(LIVE)
        assert looks.held.wait(HANG_S)
        browser.run("document.querySelector('[data-range=\"15m\"]').click()")
        browser.wait("return document.querySelector('[data-tile=texts] .axis')?.innerText.includes('15 min ago')")
        looks.release()
        asked = looks.count
        eventually(lambda: looks.count >= asked + 2)
        assert browser.text("#log") == ""


def test_a_history_that_is_not_told_once_is_asked_for_again_and_the_page_stays_live(browser):
    """That of a day is asked for each minute: one answer that failed must not leave the graphs empty for so long."""
    looks = Looks()
    asked = []

    async def respond(_request):
        looks.look()
        return web.json_response(healthy())

    async def look_back(_request):
        asked.append(looks.count)
        return web.Response(status=500) if len(asked) == 1 else web.json_response(healthy()["history"])

    with shown(browser, ScriptedState(None, respond, look_back), looks):
        browser.wait(LIVE)
        browser.run("document.querySelector('[data-range=\"24h\"]').click()")
        browser.wait("return document.querySelector('[data-tile=texts] .axis')?.innerText.includes('1 d 0 h ago')")
        assert asked[1] - asked[0] < 20, "looks of a second each"
        assert browser.text("#silence") == ""


def test_what_is_asked_before_a_pause_and_answered_in_it_changes_nothing(browser):
    looks = Looks()

    async def respond(_request):
        if looks.look() > 1:
            await looks.hold()
            return web.Response(status=500)
        return web.json_response(healthy())

    with shown(browser, ScriptedState(None, respond), looks):
        browser.wait(LIVE)
        assert looks.held.wait(HANG_S)
        browser.run("document.getElementById('pause').click()")
        paused = browser.text("#freshness")
        looks.release()
        # By its next frames but one the page has taken the answer.
        browser.wait("return performance.getEntriesByName(location.href + '/state').length >= 2")
        browser.size(1200, 900)
        assert paused.startswith("paused at")
        assert browser.text("#freshness") == paused
        assert browser.run(LIVE)
