"""POST /route/explain, and that what it says is what happens."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.application import application, built_models, with_engine
from tests.support.task_engine import TaskEngine, encoded
from tests.support.task_models import HEARER, RANKER, hearer, placement, ranker
from worker_node.core.types import Device
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.tasks.generate.messages import TokenDelta

EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
TEXT = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": TEXT}]

# A small request for each path that the node explains; `test_every_path_on_offer_is_tried` holds the two together.
BODIES = {
    "/embeddings": {"model": EMBEDDER, "texts": [TEXT]},
    "/inference": {"model": WRITER, "prompt": TEXT},
    "/v1/embeddings": {"model": EMBEDDER, "input": TEXT},
    "/v1/completions": {"model": WRITER, "prompt": TEXT},
    "/v1/chat/completions": {"model": WRITER, "messages": MESSAGES},
    "/v1/responses": {"model": WRITER, "input": TEXT},
    "/v1/messages": {"model": WRITER, "messages": MESSAGES, "max_tokens": 8},
    "/api/embed": {"model": EMBEDDER, "input": TEXT},
    "/api/embeddings": {"model": EMBEDDER, "prompt": TEXT},
    "/api/chat": {"model": WRITER, "messages": MESSAGES},
    "/api/generate": {"model": WRITER, "prompt": TEXT},
    "/rerank": {"model": RANKER, "query": TEXT, "texts": [TEXT, "Paris"]},
    "/v1/rerank": {"model": RANKER, "query": TEXT, "documents": [TEXT, "Paris"]},
}
BODIES |= {path.replace("/v1/", "/v3/"): body for path, body in BODIES.items() if path.startswith("/v1/")}
BODIES["/v2/rerank"] = BODIES["/v1/rerank"]
# Forms with a file, which are not explained.
FORMS = {f"/{version}/audio/{verb}" for version in ("v1", "v3") for verb in ("transcriptions", "translations")}


class NoEngine:
    """Has a state, and fails the test when it is given anything to do."""

    recoveries = 0

    def __init__(self, state):
        reason = None if state is EngineState.READY else "it is loaded when first needed"
        self.status = EngineStatus(state, reason)
        self.ready = state is EngineState.READY

    def __getattr__(self, name):
        pytest.fail(f"a request that was only to be explained called {name}")


@pytest.fixture(scope="module")
def models(store):
    """The embedded models with their tokenizers and limits, a reranker and a recogniser of English speech.

    What their engines would be is replaced below.
    """
    others = [make(store, [placement(name, None)]) for name, make in ((RANKER, ranker), (HEARER, hearer))]
    return [*built_models(store, EMBEDDER, WRITER), *others]


@pytest.fixture
async def explain(models, request):
    engine = NoEngine(getattr(request, "param", EngineState.READY))
    async with application([with_engine(model, engine) for model in models]) as (client, _):

        async def ask(path, body, **headers):
            wanted = {"path": path, "body": body, "headers": headers}
            async with client.post("/route/explain", json=wanted) as reply:
                return SimpleNamespace(status=reply.status, body=await reply.json())

        yield ask


async def test_every_path_on_offer_is_tried(explain):
    told = await explain("/nowhere", {})
    assert told.status == 400
    offered = told.body["error"]["message"].removeprefix("path must be one of ").split(", ")
    assert set(offered) == set(BODIES) | FORMS, "a dialect was added or removed: give its path a request here"


@pytest.mark.parametrize("path", sorted(FORMS))
async def test_a_form_with_a_file_is_not_explained(explain, path):
    told = await explain(path, {"model": HEARER})
    assert (told.status, told.body["error"]["param"]) == (400, "path")


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_of_any_dialect_is_explained_and_nothing_runs(explain, path):
    told = await explain(path, BODIES[path])
    assert told.status == 200
    assert (told.body["path"], told.body["model"]) == (path, BODIES[path]["model"])
    assert (told.body["device"], told.body["reason"], told.body["refusal"]) == ("CPU", "preferred", None)
    if path.endswith("/rerank"):
        # All pairs count; the longest one decides the route.
        assert told.body["token_count"] > told.body["prompt_tokens"] > 5
    else:
        assert told.body["token_count"] == told.body["prompt_tokens"] > 5
    [place] = told.body["placements"]
    assert (place["device"], place["holds"], place["obstacle"]) == ("CPU", True, None)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("keep_alive", [{}, {"keep_alive": 0}, {"keep_alive": "1s"}])
async def test_a_request_that_only_loads_or_unloads_has_no_route_and_does_neither(explain, path, keep_alive):
    told = await explain(path, {"model": WRITER} | keep_alive)
    assert told.status == 400
    assert "no route" in told.body["error"]["message"]


class Scripted(TaskEngine):
    """Has a state, and answers at once."""

    def __init__(self, state):
        self.state = state

    @property
    def status(self):
        return EngineStatus(self.state, "scripted", load_seconds=1000.0)

    async def next_change(self):
        await asyncio.Event().wait()

    async def embed(self, tokens, *, deadline, interactive):
        return encoded(np.zeros((len(tokens), 384)), busy_us=5)

    async def generate(self, job):
        yield TokenDelta(1, [28], "stop", busy_us=5)


def place(device, state, prompt):
    return Placement(device, Scripted(state), Admission("m", AdmissionLimits(1024)), prompt, prompt + 32)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/generate", "/embeddings"])
@pytest.mark.parametrize(
    ("npu", "words", "headers", "outcome"),
    [
        (EngineState.READY, 5, {}, "preferred"),
        (EngineState.READY, 100, {}, "context_exceeds_npu"),
        (EngineState.QUARANTINED, 5, {}, "device_quarantined"),
        (EngineState.READY, 5, {"X-NPU-Require-Device": "CPU"}, "device_required"),
        (EngineState.FAILED, 5, {"X-NPU-Require-Device": "NPU"}, "npu_unavailable"),
        (EngineState.READY, 9000, {}, "context_length_exceeded"),
    ],
)
async def test_what_is_explained_is_what_happens(models, path, npu, words, headers, outcome):
    text = "word " * words
    body = {"model": EMBEDDER, "texts": [text]} if path == "/embeddings" else {"model": WRITER, "stream": False}
    body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {}
    body |= {"prompt": text} if "generate" in path else {}
    places = (place(Device.NPU, npu, 64), place(Device.CPU, EngineState.READY, 2048))
    async with application([replace(model, placements=places) for model in models[:2]]) as (client, _):
        async with client.post("/route/explain", json={"path": path, "body": body, "headers": headers}) as reply:
            explained, status = await reply.json(), reply.status
        async with client.post(path, json=body, headers=headers) as reply:
            answer = await reply.json()
    if status == 200 and explained["refusal"] is None:
        assert (reply.status, explained["reason"]) == (200, outcome), (explained, answer)
        found = [reply.headers[f"X-NPU-Node-{name}"] for name in ("Device", "Route-Reason", "Token-Count")]
        assert found == [explained["device"], explained["reason"], str(explained["token_count"])]
    else:
        error = explained["refusal"] if status == 200 else explained["error"]
        refused = answer["error"]
        assert reply.status in {400, 503}
        assert (refused if isinstance(refused, str) else refused["message"]) == (
            error if isinstance(error, str) else error["message"]
        )
        assert status != 200 or error["code"] == outcome
