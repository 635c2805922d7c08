"""What an engine knows of the NPU's busy time reaches the reply, the metric and the trace, however an answer ends."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.recorded_spans import Recorded
from tests.support.services import services_of
from tests.support.task_engine import TaskEngine, encoded
from worker_node.core.types import Device, Finished, ModelKind, RequestContext, Sampling, TokenIds
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.tasks.embed.service import EmbeddingModel, EmbeddingRequest, embed
from worker_node.tasks.generate.answer_text import ByteDetokenizer
from worker_node.tasks.generate.messages import TokenDelta
from worker_node.tasks.generate.model import GenerationModel, GenerationRequest
from worker_node.tasks.generate.service import generate


class Tokenizer:
    """One token is one letter."""

    async def encode(self, texts, *, truncate, deadline):
        return [list(text) for text in texts]

    def check_ids(self, ids):
        return list(ids)

    end_tokens = frozenset()

    def detokenizer(self, *, skip_special_tokens):
        return ByteDetokenizer([bytes([code]) for code in range(128)])


class Engine(TaskEngine):
    """Writes `one two`, and sees from the second letter on whether others use the NPU."""

    status = EngineStatus(EngineState.READY)

    def __init__(self, *, shared):
        self._shared = shared

    async def embed(self, tokens, *, deadline, interactive):
        return encoded(np.zeros((len(tokens), 1)), busy_us=7, busy_shared=self._shared)

    async def generate(self, job):
        for count, letter in enumerate(b"one two", 1):
            yield TokenDelta(1, [letter], None, busy_us=count, busy_shared=self._shared and count > 1)
        yield TokenDelta(1, [], "stop", busy_us=7, busy_shared=self._shared)


def serve(shared):
    """The services of two models, and the spans of their requests."""
    recorded = Recorded()
    placement = Placement(Device.NPU, Engine(shared=shared), Admission("m", AdmissionLimits(8)), 256, 256)
    models = [
        EmbeddingModel(
            SimpleNamespace(id="e", kind=ModelKind.EMBEDDING, aliases=()), (placement,), Tokenizer(), "s", 1
        ),
        GenerationModel(
            SimpleNamespace(id="g", kind=ModelKind.GENERATION, family="llama", aliases=()), (placement,), Tokenizer()
        ),
    ]
    return services_of(models, tracing=recorded.tracing), recorded


def context():
    now = time.monotonic()
    return RequestContext("req_1", now, now + 60)


def exclusive(registry):
    samples = [sample for family in registry.telemetry.npu_busy.collect() for sample in family.samples]
    return {sample.labels["exclusive"]: round(sample.value * 1e6) for sample in samples}


def busy_time_of(recorded, name):
    attributes = recorded.spans[name].attributes
    return attributes["npu.busy_time_us"], attributes.get("npu.busy_exclusive") is False


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("stop", "busy_us"), [((), 7), ((" t",), 5)], ids=["to its end", "to a stop sequence"])
async def test_a_generation_reports_its_busy_time_and_whether_it_was_shared(shared, stop, busy_us):
    registry, recorded = serve(shared)
    request = GenerationRequest(context(), TokenIds((1,)), Sampling(stop=stop))
    async with generate(registry, request) as run:
        events = [event async for _, event, _ in run.events]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.npu_busy_delta_us, finished.npu_busy_shared) == (busy_us, shared)
    assert busy_time_of(recorded, "text_completion g") == (busy_us, shared)
    assert exclusive(registry) == {"false" if shared else "unknown": busy_us}


@pytest.mark.parametrize("shared", [False, True])
async def test_an_embedding_reports_its_busy_time_and_whether_it_was_shared(shared):
    registry, recorded = serve(shared)
    reply = await embed(registry, EmbeddingRequest(context(), ((1, 2),)))
    assert (reply.npu_busy_delta_us, reply.npu_busy_shared) == (7, shared)
    assert busy_time_of(recorded, "embeddings e") == (7, shared)
    assert exclusive(registry) == {"false" if shared else "unknown": 7}
