"""Curves tell how fast something grows; peers are compared in what they serve; a run gives a page."""

from types import SimpleNamespace

import pytest
from aiohttp import web

from benchmarks import page, peers
from benchmarks.curves.curve import Curve, Series


@pytest.mark.parametrize(
    ("values", "power", "verdict"),
    [
        ([5.0, 5.0, 5.0], 0.0, "flat"),
        ([1.0, 10.0, 100.0], 1.0, "at most linear"),
        ([1.0, 100.0, 10_000.0], 2.0, "FASTER THAN LINEAR"),
        ([0.0, 0.0, 0.0], 0.0, "flat"),
    ],
)
def test_the_power_of_growth(values, power, verdict):
    series = Series("s", "ms", values)
    curve = Curve("c", "n", [10, 100, 1000], [series])
    assert curve.power(series) == pytest.approx(power)
    assert curve.verdict(series) == verdict


def test_the_slope_is_what_one_more_adds():
    series = Series("s", "MB", [107.0, 170.0, 800.0])
    assert Curve("c", "n", [10, 100, 1000], [series]).slope(series) == pytest.approx(0.7)


def test_a_page_without_ratios_needs_no_plots(tmp_path):
    figure = {"name": "idle", "unit": "%", "values": [1.0, 3.0, 2.0], "ratios": [], "target": None, "median": 2.0}
    results = {"machine": {"cores": 4}, "quiet": {"line": "quiet machine"}, "figures": {"edge-cpu": [figure]}}
    text = page.write(tmp_path / "page", results).read_text()
    assert "- cores: 4" in text
    assert "quiet machine" in text
    assert "| idle | 2 % | 1 … 3 |  |  |" in text


def test_a_curve_is_on_the_page_with_its_plot_and_its_growth(tmp_path):
    pytest.importorskip("matplotlib")
    curve = Curve("open connections", "connections", [10, 100], [Series("memory", "MB", [107.0, 170.0])])
    results = {"machine": {}, "quiet": {"line": ""}, "figures": {"curves-connections": [curve.to_json()]}}
    text = page.write(tmp_path, results).read_text()
    assert "![open connections](curve-open-connections.svg)" in text
    assert "| memory, MB | 107 | 170 | 0.20 (at most linear) | 0.7 |" in text
    assert (tmp_path / "curve-open-connections.svg").read_text().startswith("<?xml")


async def test_a_peer_that_does_not_answer_is_named_before_anything_is_measured(aiohttp_server, monkeypatch):
    there = await aiohttp_server(server("another", embeds=True))
    monkeypatch.setattr(peers, "PEERS", {"here": str(there.make_url("/v1")), "gone": "http://127.0.0.1:9"})
    assert await peers.unreachable() == ["gone"]


def server(model, *, embeds):
    async def models(_request):
        return web.json_response({"data": [{"id": model}]})

    async def answer(request):
        body = await request.json()
        assert body["model"] == model
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/embeddings" if embeds else "/v1/completions", answer)
    return app


async def test_a_peer_is_compared_in_what_it_serves(aiohttp_server, monkeypatch):
    node = await aiohttp_server(server("all-minilm-l6-v2", embeds=True))
    peer = await aiohttp_server(server("another", embeds=True))
    other = await aiohttp_server(server("a-writer", embeds=False))
    addresses = {"infinity": f"{peer.make_url('')}/v1", "llama-server": str(other.make_url(""))}
    monkeypatch.setattr(peers, "PEERS", {"infinity": addresses["infinity"]})
    monkeypatch.setattr(peers, "EMBEDDING_CASES", ((64, 2),))
    figures = await peers.run(SimpleNamespace(url=str(node.make_url("")).rstrip("/")), None, True)
    assert [figure["name"] for figure in figures] == ["node", "infinity"]
    assert len(figures[1]["ratios"]) == 2
    async with peers.session() as http:
        assert await peers._serving(http, "w", addresses["llama-server"], "/v1/embeddings") is None
        assert (await peers._serving(http, "w", addresses["llama-server"], "/v1/completions")).model == "a-writer"
