"""A server of the dashboard's real page, and states that no healthy node has: scripted, so that each can be had."""

from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from tests.faults.scripted_node import served_in_thread
from worker_node.http import pages

HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
LONG = "an-organisation/a-model-with-a-very-long-name-that-no-column-was-made-for-" + "x" * 60


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
    """A server of the real page whose state is whatever `state` is; None: it answers 500.

    `respond`, and for its history `look_back`, answer in its place: coroutine functions of the request.
    """

    def __init__(self, state, respond=None, look_back=None):
        self.state = state
        self.respond = respond or self._tell
        self.look_back = look_back or self._tell
        self.routes = []
        self.url = ""

    async def _tell(self, _request):
        return web.Response(status=500) if self.state is None else web.json_response(self.state)

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.add_routes([web.get(path, pages.show_page) for path in ("/dashboard", "/play")] + self.routes)
        app.add_routes([web.get("/dashboard/state", self.respond)])
        app.add_routes([web.get("/dashboard/history", self.look_back)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@contextmanager
def shown(browser, scripted, path="/dashboard", until="return document.querySelector('#models tbody tr')", errors=()):
    """The page of this server, once it shows what the script `until` looks for; it must leave no other errors."""
    with served_in_thread(scripted) as url:
        browser.open(url + path)
        browser.wait(until)
        yield
        assert [said for said in browser.leave() if not any(words in said for words in errors)] == []
