"""POST /route/explain, and that what it says is what happens."""

import asyncio
import json
import random
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
    "/api/embed": {"model": EMBEDDER, "input": TEXT},
    "/api/embeddings": {"model": EMBEDDER, "prompt": TEXT},
    "/api/chat": {"model": WRITER, "messages": MESSAGES},
    "/api/generate": {"model": WRITER, "prompt": TEXT},
    "/rerank": {"model": RANKER, "query": TEXT, "texts": [TEXT, "Paris"]},
    "/v1/rerank": {"model": RANKER, "query": TEXT, "documents": [TEXT, "Paris"]},
    # The fields of the form; the file is left out.
    "/v1/audio/transcriptions": {"model": HEARER, "response_format": "verbose_json", "temperature": 0},
}
BODIES |= {path.replace("/v1/", "/v3/"): body for path, body in BODIES.items() if path.startswith("/v1/")}
BODIES["/v2/rerank"] = BODIES["/v1/rerank"]
# The recogniser here knows English only, and refuses these.
TRANSLATIONS = ("/v1/audio/translations", "/v3/audio/translations")


class NoEngine:
    """Has a state, and fails the test when it is given anything to do."""

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
    """Ask a node, the state of whose engines is the parameter (ready), to explain a request."""
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
    assert set(offered) == set(BODIES) | set(TRANSLATIONS), (
        "a dialect was added or removed: give its path a request here"
    )


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_of_any_dialect_is_explained_and_nothing_runs(explain, path):
    told = await explain(path, BODIES[path])
    assert told.status == 200
    assert (told.body["path"], told.body["model"]) == (path, BODIES[path]["model"])
    assert (told.body["device"], told.body["reason"], told.body["refusal"]) == ("CPU", "preferred", None)
    if path.endswith("/rerank"):
        # All pairs count; the longest one decides the route.
        assert told.body["token_count"] > told.body["prompt_tokens"] > 5
    elif "/audio/" in path:
        assert told.body["token_count"] == 1, "how long the recording is decides no route"
    else:
        assert told.body["token_count"] == told.body["prompt_tokens"] > 5
    [place] = told.body["placements"]
    assert (place["device"], place["holds"], place["obstacle"]) == ("CPU", True, None)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": TEXT, "documents": []}, "documents"),
        ("/rerank", {"query": TEXT, "texts": ["word " * 9000]}, "texts[0]"),
        ("/v1/audio/transcriptions", {"response_format": "xml"}, "response_format"),
        ("/v1/audio/transcriptions", {"stream": "perhaps"}, "stream"),
        ("/v1/audio/transcriptions", {"language": "en"}, "language"),
    ],
)
async def test_wrong_fields_of_the_newer_tasks_are_refused_here_as_they_would_be(explain, path, body, param):
    told = await explain(path, body)
    assert (told.status, told.body["error"]["param"]) == (400, param)


EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
CASES = 250
STATES = (EngineState.READY, *EngineState)


class Engine(TaskEngine):
    """In some state; what is woken or starts in a short time is ready as soon as somebody waits."""

    def __init__(self, state, load_seconds, *, served):
        self.state = state
        self.load_seconds = load_seconds
        self.served = served

    @property
    def status(self):
        return EngineStatus(self.state, "scripted", load_seconds=self.load_seconds, served=self.served)

    def wake(self):
        if self.state is EngineState.UNLOADED:
            self.state = EngineState.STARTING

    async def next_change(self):
        if self.load_seconds > 1 or self.state not in {EngineState.STARTING, EngineState.BACKING_OFF}:
            await asyncio.Event().wait()
        self.state = EngineState.READY

    async def embed(self, tokens, *, deadline, interactive):
        assert self.state is EngineState.READY
        return encoded(np.zeros((len(tokens), 384)), busy_us=5)

    async def generate(self, job):
        assert self.state is EngineState.READY
        assert job.max_new_tokens > 0
        logprobs = [-0.5] if job.logprobs else None
        yield TokenDelta(1, [28], "stop", logprobs=logprobs, busy_us=5)


def placements(rng):
    """One to three, each in any state, with limits around the lengths of the requests."""
    devices = sorted(rng.sample(list(Device), rng.randint(1, 3)), key=list(Device).index)
    made = []
    for index, device in enumerate(devices):
        prompt = rng.choice((16, 64, 128, 2048))
        made.append(
            Placement(
                device,
                Engine(rng.choice(STATES), rng.choice((0.001, 1000.0)), served=rng.random() < 0.5),
                Admission("m", AdmissionLimits(1024)),
                prompt,
                prompt + rng.choice((0, 1, 32)),
                on_demand=index > 0,
                lacks=frozenset({"n", "logprobs"}) if device is Device.NPU else frozenset(),
            )
        )
    return tuple(made)


def request(rng):
    """Path, body and headers of a request of any dialect."""
    text = "word " * rng.choice((1, 10, 40, 100, 200))
    messages = [{"role": "user", "content": text}]
    limit = rng.choice((None, 1, 30, 4096))
    several = {"n": rng.choice((1, 2))} if rng.random() < 0.3 else {}
    chat_logprobs = {"logprobs": True} if rng.random() < 0.3 else {}
    text_logprobs = {"logprobs": 0} if rng.random() < 0.3 else {}
    openai = {} if limit is None else {"max_tokens": limit}
    ollama = {"options": {} if limit is None else {"num_predict": limit}, "stream": rng.random() < 0.5}
    if rng.random() < 0.2:
        ollama["options"]["num_ctx"] = rng.choice((20, 100, 4096))
    prompts = rng.choice((text, text, [text, "short"], ["short", text]))
    path, body = rng.choice(
        (
            ("/embeddings", {"model": EMBEDDER, "texts": [text, "short"]}),
            ("/v1/embeddings", {"model": EMBEDDER, "input": text}),
            ("/api/embed", {"model": EMBEDDER, "input": text}),
            ("/api/embeddings", {"model": EMBEDDER, "prompt": text}),
            ("/inference", {"model": WRITER, "prompt": text} | ({} if limit is None else {"max_new_tokens": limit})),
            ("/v1/completions", {"model": WRITER, "prompt": prompts} | openai | several | text_logprobs),
            ("/v1/chat/completions", {"model": WRITER, "messages": messages} | openai | several | chat_logprobs),
            ("/v1/responses", {"model": WRITER, "input": text}),
            ("/api/chat", {"model": WRITER, "messages": messages} | ollama),
            ("/api/generate", {"model": WRITER, "prompt": text} | ollama),
        )
    )
    headers = {}
    if rng.random() < 0.3:
        headers["X-NPU-Require-Device"] = rng.choice(list(Device))
    if rng.random() < 0.3:
        headers["X-NPU-Min-New-Tokens"] = rng.choice(("1", "20", "40", "0"))
    if rng.random() < 0.3:
        headers["X-Request-Timeout-Ms"] = "30000"
    return path, body, headers


@pytest.fixture
async def ask(store):
    """Ask a node of random placements about a request, and for it."""
    models = built_models(store, EMBEDDER, WRITER)
    async with application(cache=100) as (client, node):
        registry = node.manager

        async def both(places, path, body, headers):
            for model in registry.models:
                registry.names.drop(model)
            for model in models:
                registry.add(replace(model, placements=places))
            wanted = {"path": path, "body": body, "headers": headers}
            async with client.post("/route/explain", json=wanted) as reply:
                told = (reply.status, await reply.json())
            async with client.post(path, json=body, headers=headers) as reply:
                return told, (reply.status, reply.headers.copy(), await reply.text())

        yield both


async def test_what_is_explained_is_what_happens(ask):
    rng = random.Random(13)
    outcomes = set()
    for case in range(CASES):
        places, asked = placements(rng), request(rng)
        states = [(place.device, place.engine.state.name, place.prompt_limit) for place in places]
        (explained, told), (status, headers, text) = await ask(places, *asked)
        about = f"case {case}: {asked} over {states}: told {told}, got {status} {text[:300]}"
        if explained != 200:
            assert (status, _message(text)) == (explained, told["error"]["message"]), about
            outcomes.add("refused")
        elif told["refusal"] is not None:
            assert _message(text) == told["refusal"]["message"], about
            assert status == _STATUS[told["refusal"]["code"]], about
            outcomes.add(told["refusal"]["code"])
        else:
            assert status == 200, about
            got = (headers["X-NPU-Node-Device"], headers["X-NPU-Node-Route-Reason"])
            assert got == (told["device"], told["reason"]), about
            assert headers["X-NPU-Node-Token-Count"] == str(told["token_count"]), about
            outcomes.add(told["reason"])
    assert outcomes >= {"preferred", "context_exceeds_npu", "unsupported_on_npu", "device_required", "model_loading"}
    assert outcomes >= {"refused", "context_length_exceeded", "unsupported_parameter", "npu_unavailable"}


_STATUS = {
    "context_length_exceeded": 400,
    "unsupported_parameter": 400,
    "npu_unavailable": 503,
    "model_loading": 503,
    "engine_unavailable": 503,
}


def _message(text):
    error = json.loads(text)["error"]
    return error if isinstance(error, str) else error["message"]
