"""The spans of rerankings and transcriptions, over HTTP: their stages, what they tell, and how they end.

Engines are scripted; the decoding of audio is real.
"""

import asyncio
import io
import json
import time
import wave

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.application import application
from tests.support.recorded_spans import Recorded
from tests.support.scripted_runner import result_of
from tests.support.task_models import HEARER, RANKER, hearer, placement, ranker, request
from worker_node.encoders.jobs import RowJob
from worker_node.engines.protocol import EngineState, EngineStatus

SECRET = "an unlikely secret"
RUN_S = 0.02
PASSAGES = 3
STAGES = {"tokenize": 1, "route": 1, "queue": 1, "engine": 1}


class Engine:
    """Takes RUN_S for each job."""

    ready = True
    status = EngineStatus(EngineState.READY, None, pid=4321)

    async def run(self, job, _result):
        began = time.monotonic()
        await asyncio.sleep(RUN_S)
        result = replace(result_of(job), started=began, inference_s=RUN_S)
        yield result if isinstance(job, RowJob) else replace(result, tokens=2, busy_us=7)


def form(*, stream=False):
    """Eighty seconds of noise, which are three passages, as fields of a form."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(1).integers(-9000, 9000, 80 * 16_000, np.int16).tobytes())
    fields = aiohttp.FormData(default_to_multipart=True)
    for name, value in {"model": HEARER, "prompt": SECRET, "stream": str(stream).lower()}.items():
        fields.add_field(name, value)
    target.seek(0)
    fields.add_field("file", target, filename="speech.wav")
    return fields


class World:
    """A node with both models on one engine, whose spans are recorded."""

    def __init__(self, client, recorded):
        self.client, self.recorded = client, recorded

    async def post(self, path, **body):
        async with self.client.post(path, **body) as reply:
            return reply.status, await reply.text()

    async def finished(self, name):
        """The span of this name, once it has ended."""
        async with asyncio.timeout(60):
            while name not in self.recorded.spans:
                await asyncio.sleep(0.01)
        return self.recorded.spans[name]

    def stages(self, name):
        """How often each stage came in the span of this name; each lies within it."""
        spans = self.recorded.exporter.get_finished_spans()
        parent = self.recorded.spans[name]
        found = {}
        for span in spans:
            if span.parent is not None and span.parent.span_id == parent.context.span_id:
                assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
                found[span.name] = found.get(span.name, 0) + 1
        return found

    async def metrics(self):
        async with self.client.get("/metrics") as reply:
            return await reply.text()


@pytest.fixture
def traced(store):
    """Serves both models on an engine, within the block."""

    class Traced:
        def __init__(self, engine):
            models = [make(store, [placement(name, engine)]) for name, make in ((RANKER, ranker), (HEARER, hearer))]
            recorded = Recorded()
            self.application = application(models, tracing=recorded.tracing)
            self.recorded = recorded

        async def __aenter__(self):
            client, self.node = await self.application.__aenter__()
            return World(client, self.recorded)

        async def __aexit__(self, *error):
            await self.node.services.parts.close()
            await self.application.__aexit__(*error)

    return Traced


def no_text(world):
    return SECRET not in json.dumps([span.to_json() for span in world.recorded.exporter.get_finished_spans()])


async def test_a_reranking_is_one_trace_of_its_stages(traced):
    async with traced(Engine()) as world:
        path, body = request(RANKER, SECRET)
        status, _ = await world.post(path, **body)
        assert status == 200
        span = await world.finished(f"rerank {RANKER}")
        server = await world.finished("POST /v2/rerank")
        assert span.parent.span_id == server.context.span_id
        assert world.stages(f"rerank {RANKER}") == STAGES
        told = span.attributes
        assert (told["gen_ai.operation.name"], told["npu.texts"]) == ("rerank", 2)
        assert (told["gen_ai.response.model"], told["npu.device"], told["npu.route_reason"]) == (
            RANKER,
            "CPU",
            "preferred",
        )
        assert told["gen_ai.usage.input_tokens"] > 2
        assert not {"npu.abandoned", "error.type", "gen_ai.usage.output_tokens"} & set(told)
        engine = world.recorded.spans["engine"]
        assert engine.end_time - engine.start_time == pytest.approx(RUN_S * 1e9, abs=1e6)
        assert engine.attributes["process.pid"] == 4321
        assert no_text(world)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_transcription_is_one_trace_with_an_engines_span_for_each_passage(traced, stream):
    async with traced(Engine()) as world:
        status, text = await world.post("/v1/audio/transcriptions", data=form(stream=stream))
        assert (status, "error" in text) == (200, False)
        span = await world.finished(f"transcribe {HEARER}")
        server = await world.finished("POST /v1/audio/transcriptions")
        assert span.parent.span_id == server.context.span_id
        assert world.stages(f"transcribe {HEARER}") == STAGES | {"queue": PASSAGES, "engine": PASSAGES}
        told = span.attributes
        assert told["gen_ai.operation.name"] == "transcribe"
        assert told["npu.route_reason"] == "preferred", "that of the first passage, as in the reply"
        assert told["gen_ai.usage.input_tokens"] == 80 * 50, "50 positions a second of the whole recording"
        assert told["npu.busy_time_us"] == 7 * PASSAGES
        assert not {"npu.abandoned", "error.type"} & set(told)
        assert no_text(world)
        assert f'npu_node_audio_seconds_total{{device="CPU",model="{HEARER}"}} 80.0' in await world.metrics()
