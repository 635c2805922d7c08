"""The gateway's pages: the fleet with its teams at /dashboard, a playground at /play, and the state that both show."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import Counter

from backend_client.cli.dashboard import Fleet, fetch_state, page_headers, read_pages
from backend_client.client import InferenceClient
from backend_client.gateway.forward import TEAM
from backend_client.gateway.keys import KeyEntry, KeyStore, Team
from backend_client.gateway.limits import Metrics

# Served to everybody: they hold no data.
OPEN_PATHS = frozenset({"/dashboard", "/play"})
STATE_PATH = "/dashboard/state"
# The pages ask every second.
_PERIOD_S = 0.9
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def add_page(app: web.Application, client: InferenceClient, keys: KeyStore | None, metrics: Metrics) -> None:
    """Register the pages and their state. The application answers 401 to a request without a key, where it has keys."""
    fleet = Fleet(client.npu, partial(fetch_state, client.npu))
    shared = SharedState(fleet.state)

    for path, html in read_pages().items():
        # The pages of nodes and of npu-client are the same ones; here they are told whose they are.
        text = html.replace("<html ", '<html data-server="gateway" ', 1)
        app.router.add_get(path, _page(text))

    async def state(request: web.Request) -> web.Response:
        viewer = request[TEAM]
        entries = None if keys is None else keys.entries
        gateway = {
            "team": None if keys is None else viewer.name,
            "admin": keys is None or viewer.admin,
            "cloud": client.healthz().cloud or "none",
            "teams": teams_shown(viewer, entries, usage_by_team(metrics.requests, metrics.tokens), time.time()),
        }
        return web.json_response({**await shared.get(), "gateway": gateway}, headers=_HEADERS)

    app.router.add_get(STATE_PATH, state)


def _page(text: str) -> Handler:
    headers = page_headers(text)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/html", headers=headers)

    return page


class SharedState:
    """One state for all who look: however many pages are open, each node is asked once a period."""

    def __init__(
        self, look: Callable[[], Awaitable[dict[str, Any]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look
        self._clock = clock
        self._latest: dict[str, Any] = {}
        self._began = -math.inf
        self._looking = asyncio.Lock()

    async def get(self) -> dict[str, Any]:
        """The state: of the last period, or of a look that ends meanwhile."""
        before = self._latest
        async with self._looking:
            began = self._clock()
            if self._latest is before and began - self._began >= _PERIOD_S:
                self._latest, self._began = await self._look(), began
            return self._latest


def usage_by_team(requests: Counter, tokens: Counter) -> dict[str, dict[str, int]]:
    """Of each team since this process started: `requests`, those of them `refused` (4xx) or `failed` (5xx), and tokens
    by kind.
    """
    found: dict[str, dict[str, int]] = {}
    for counter in (requests, tokens):
        for sample in (sample for metric in counter.collect() for sample in metric.samples):
            if not sample.name.endswith("_total"):
                continue
            none = dict.fromkeys(("requests", "refused", "failed", "prompt", "completion"), 0)
            usage, count = found.setdefault(sample.labels["team"], none), int(sample.value)
            if counter is tokens:
                usage[sample.labels["kind"]] += count
                continue
            usage["requests"] += count
            kind = {"4": "refused", "5": "failed"}.get(sample.labels["status"][0])
            if kind is not None:
                usage[kind] += count
    return found


def teams_shown(
    viewer: Team, entries: Iterable[KeyEntry] | None, usage: dict[str, dict[str, int]], now: float
) -> list[dict[str, Any]]:
    """The teams that the holder of a key may see, by name: all of them for an admin, else their own.

    Without keys (`entries` is None) there is one, whoever asks. A team whose last key was revoked stays as long as its
    requests are counted.
    """
    if entries is None:
        return [{"team": viewer.name, "used": usage.get(viewer.name), "keys": []}]
    keys: dict[str, list[dict[str, Any]]] = {name: [] for name in usage}
    for entry in entries:
        team = entry.team
        names = "cloud", "admin", "requests", "tokens"
        row = {"prefix": entry.prefix, "models": sorted(team.models), **{name: getattr(team, name) for name in names}}
        row["spend_cap"] = None if team.spend_cap is None else f"{team.spend_cap:f}"
        row |= {"until": entry.until, "ended": entry.until is not None and entry.until <= now}
        keys.setdefault(team.name, []).append(row)
    return [
        {"team": name, "used": usage.get(name), "keys": rows}
        for name, rows in sorted(keys.items())
        if viewer.admin or name == viewer.name
    ]
