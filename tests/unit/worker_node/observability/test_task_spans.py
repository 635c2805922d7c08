"""The spans of rerankings and transcriptions, over HTTP: their stages, and what they name. Engines are scripted."""

import asyncio
import time

import pytest
from msgspec.structs import replace

from tests.support.application import application
from tests.support.scripted_runner import result_of
from tests.support.task_models import HEARER, RANKER, hearer, placement, ranker, request
from tests.unit.worker_node.observability.recorded_spans import Recorded
from worker_node.core.types import Busy
from worker_node.encoders.jobs import RowJob
from worker_node.engines.protocol import EngineState, EngineStatus

SECRET = "an unlikely secret"
RUN_S = 0.02


class Engine:
    """Takes RUN_S for each job."""

    ready = True
    recoveries = 0
    status = EngineStatus(EngineState.READY, None, pid=4321)

    async def run(self, job, _result):
        began = time.monotonic()
        await asyncio.sleep(RUN_S)
        result = replace(result_of(job), started=began, inference_s=RUN_S)
        yield result if isinstance(job, RowJob) else replace(result, tokens=2, busy=Busy(7))


@pytest.mark.parametrize(
    ("name", "make", "words", "operation", "attributes"),
    [
        (RANKER, ranker, (SECRET,), "rerank", {"npu.texts": 2}),
        (HEARER, hearer, (), "transcribe", {"npu.busy_time_us": 7, "gen_ai.usage.input_tokens": 25}),
    ],
)
async def test_a_request_of_a_task_is_one_trace_of_its_stages(store, name, make, words, operation, attributes):
    recorded = Recorded()
    models = [make(store, [placement(name, Engine())])]
    async with application(models, tracing=recorded.tracing) as (client, node):
        path, body = request(name, *words)
        async with client.post(path, **body) as reply:
            assert reply.status == 200, await reply.text()
        async with asyncio.timeout(60):
            while f"POST {path}" not in recorded.spans:
                await asyncio.sleep(0.01)
        await node.services.parts.close()
    whole = f"{operation} {name}"
    assert recorded.tree() == {
        f"POST {path}": None,
        whole: f"POST {path}",
        **dict.fromkeys(("tokenize", "route", "queue", "engine"), whole),
    }
    span, engine = recorded.spans[whole], recorded.spans["engine"]
    expected = attributes | {
        "gen_ai.operation.name": operation,
        "gen_ai.response.model": name,
        "npu.device": "CPU",
        "npu.route_reason": "preferred",
    }
    assert expected.items() <= dict(span.attributes).items()
    assert not {"npu.abandoned", "error.type"} & set(span.attributes)
    assert engine.end_time - engine.start_time == pytest.approx(RUN_S * 1e9, abs=1e6)
    assert SECRET not in "".join(each.to_json() for each in recorded.exporter.get_finished_spans())
