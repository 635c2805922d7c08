"""What /route/explain says of a request is what the request gets: random requests over random states of placements.

Engines are scripted; the application, its dialects and tokenizers are real, and both questions go over HTTP.
"""

import asyncio
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.support.application import application, built_models
from tests.support.task_engine import TaskEngine
from worker_node.core.types import Device
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.tasks.embed.messages import EmbeddingOutput
from worker_node.tasks.generate.messages import TokenDelta

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
        return EmbeddingOutput(np.zeros((len(tokens), 384), np.float32), time.monotonic(), 0.0, 5, False)

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
                registry.drop(model)
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
