"""POST /route/explain over Ollama's dialect: it tells where a request would run, and changes nothing."""

from datetime import datetime

import pytest

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Hello"}]


async def explain(http, node, path, **body):
    wanted = {"path": path, "body": {"model": MODEL, **body}}
    async with http.post(node.url + "/route/explain", json=wanted) as reply:
        return reply.status, await reply.json()


async def loaded(http, node):
    """The models in memory, and until when, in seconds."""
    async with http.get(node.url + "/api/ps") as reply:
        models = (await reply.json())["models"]
    return {model["name"]: datetime.fromisoformat(model["expires_at"]).timestamp() for model in models}


def unchanged(before):
    """Nearly, since the node adds the time that is left to the time of asking."""
    return pytest.approx(before, abs=1.0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": MESSAGES}),
        ("/api/generate", {"prompt": "Hello"}),
        ("/api/embed", {"model": "all-minilm", "input": "Hello"}),
        ("/api/embeddings", {"model": "all-minilm", "prompt": "Hello"}),
    ],
)
async def test_a_route_is_told_and_how_long_a_model_stays_is_left_alone(http, node, path, body):
    before = await loaded(http, node)
    status, told = await explain(http, node, path, keep_alive="1m", **body)
    assert (status, told["device"], told["reason"]) == (200, "CPU", "preferred")
    assert told["token_count"] > 0
    assert await loaded(http, node) == unchanged(before)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("keep_alive", [{}, {"keep_alive": 0}, {"keep_alive": "1s"}])
async def test_a_request_that_only_loads_or_unloads_has_no_route_and_does_neither(http, node, path, keep_alive):
    before, engines = await loaded(http, node), node.engine_pids()
    status, told = await explain(http, node, path, **keep_alive)
    assert status == 400
    assert "no route" in told["error"]["message"]
    assert await loaded(http, node) == unchanged(before)
    assert node.engine_pids() == engines
    status, told = await explain(http, node, path, keep_alive="soon")
    assert (status, told["error"]["param"]) == (400, "keep_alive")
