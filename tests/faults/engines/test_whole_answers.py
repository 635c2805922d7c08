"""An engine that dies in the middle of answers: those that are sent as a whole are run again. Real sockets, a real
tokenizer, a scripted engine."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from tests.faults.engines.test_engine_faults import QUICK, RUNNER, no_canary, until
from worker_node.app import make_app
from worker_node.core.types import Device, ModelKind
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.supervisor import SupervisedEngine
from worker_node.server import Profile, configured_models, running_node
from worker_node.settings import ModelSettings, NodeSettings

WRITER = "smollm2-135m-instruct"
SETTINGS = NodeSettings(port=0, models=(ModelSettings(name=WRITER, placements=("CPU",)),))
WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
CHAT = {"model": WRITER, "messages": [{"role": "user", "content": WORDS}], "temperature": 0}
WHOLE = {
    "/inference": {"prompt": WORDS},
    "/v1/completions": {"model": WRITER, "prompt": [WORDS, WORDS + " again"], "n": 2, "max_tokens": 100},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": WRITER, "input": WORDS},
    "/api/generate": {"model": WRITER, "prompt": WORDS, "stream": False},
    "/api/chat": {"model": WRITER, "messages": CHAT["messages"], "stream": False},
}
STREAM = {"/v1/chat/completions": CHAT | {"stream": True}}


def scripted_models(log, machine):
    """The configured model with an engine that answers with its prompt, a token in 50 ms."""
    [model] = configured_models(machine)
    spec = EngineSpec(WRITER, ModelKind.GENERATION, "/", Device.CPU, RUNNER, {"step_s": 0.05, "log": str(log)})
    limits = EngineLimits(restart=QUICK)
    engine = SupervisedEngine(spec, no_canary, limits, lazy=True, suspects=model.placements[0].suspects)
    return [replace(model, placements=tuple(replace(place, engine=engine) for place in model.placements))]


def what_was_said(body):
    """The reply without what differs from one to the next."""
    if isinstance(body, dict):
        named = {key: value for key, value in body.items() if key in KEPT}
        return {key: what_was_said(value) for key, value in named.items()}
    return [what_was_said(entry) for entry in body] if isinstance(body, list) else body


KEPT = {
    "choices",
    "text",
    "message",
    "content",
    "output",
    "response",
    "status",
    "finish_reason",
    "done_reason",
    "usage",
}
KEPT |= {"prompt_tokens", "completion_tokens", "output_tokens", "eval_count", "prompt_eval_count"}


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["killed from outside", "crashed"])
async def test_answers_that_are_sent_as_a_whole_survive_their_engine_and_streams_end_with_an_error(
    number, http, tmp_path
):
    # Up to 15 s on a busy machine: two engine processes, and a node with its tokenizer.
    log = tmp_path / "log"

    async def post(url, path, body):
        async with http.post(url + path, json=body, headers={"X-Request-Timeout-Ms": "60000"}) as reply:
            return reply.status, await reply.read() if body.get("stream") is True else what_was_said(await reply.json())

    def steps():
        return [line for line in log.read_text().splitlines() if line.startswith("step of")]

    async with running_node(SETTINGS, Profile(lambda machine: scripted_models(log, machine), make_app)) as (node, url):
        [model] = node.manager.models
        engine = model.placements[0].engine
        await until(engine, EngineState.READY)
        wanted = await asyncio.gather(*(post(url, path, body) for path, body in WHOLE.items()))
        assert {status for status, _ in wanted} == {200}
        before = len(steps())
        working = [asyncio.create_task(post(url, path, body)) for path, body in (*WHOLE.items(), *STREAM.items())]
        # All of them are at work, and have had tokens.
        async with asyncio.timeout(60):
            while sum(line == "step of 10" for line in steps()[before:]) < 4:
                await asyncio.sleep(0.01)
        os.kill(engine.status.pid, number)
        *answers, (status, streamed) = await asyncio.gather(*working)
        assert answers == wanted
        assert (status, b'"code":"engine_unavailable"' in streamed) == (200, True)
        assert engine.status.restarts == 1
        assert model.placements[0].admission.outstanding == 0
