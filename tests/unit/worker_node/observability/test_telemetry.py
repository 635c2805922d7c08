"""The metrics of a node: counters, histograms, the lag of the event loop."""

import asyncio
import time

import numpy as np
import pytest

from worker_node.core.types import Busy, Device, Energy, Route, Timing, Usage
from worker_node.http.routes import task_apis
from worker_node.observability.metrics import Telemetry
from worker_node.tasks.embed.service import EmbeddingReply, count_embedding
from worker_node.tasks.generate.answer import count_generation
from worker_node.tasks.generate.blocks import Finished, FinishReason
from worker_node.tasks.generate.metrics import GenerationMetrics

LABELS = {"model": "m", "device": "NPU"}


@pytest.fixture
def telemetry():
    telemetry = Telemetry()
    telemetry.declare(GenerationMetrics)
    return telemetry


def value(telemetry, name, **labels):
    return telemetry.registry.get_sample_value(f"npu_node_{name}", labels)


def by_exclusive(counter):
    """The sums of a counter by its labels emulated and exclusive."""
    samples = [sample for family in counter.collect() for sample in family.samples]
    return {(sample.labels["emulated"], sample.labels["exclusive"]): sample.value for sample in samples}


def test_what_others_are_known_to_share_is_kept_apart(telemetry):
    route = Route("m", Device.NPU, "preferred", 12)
    timing = Timing(queue=0.0, tokenize=0.0, inference=1.0, total=1.0)
    for busy_us, shared in ((1_000_000, False), (2_000_000, True)):
        reply = EmbeddingReply(
            route, np.zeros((1, 2), np.float32), "s", Usage(1), timing, Busy(busy_us, shared, Energy(0.5)), computed=1
        )
        count_embedding(telemetry, reply)
    count_generation(
        telemetry, route, Finished(FinishReason.STOP, Usage(1, 1), timing, Busy(4_000_000, True, Energy(2.0)))
    )
    assert by_exclusive(telemetry.npu_busy) == {("false", "unknown"): 1, ("false", "false"): 6}
    assert by_exclusive(telemetry.joules) == {("false", "unknown"): 0.5, ("false", "false"): 2.5}


def test_a_generation_is_counted_with_its_latencies(telemetry):
    route = Route("m", Device.NPU, "context_exceeds_npu", 30)
    timing = Timing(queue=1.0, tokenize=0.5, inference=99.0, total=110.0, first_token=10.0)
    for tokens in (1, 4, 6):
        telemetry.made["tokens"].labels(route.model, route.device).inc(tokens)
    assert value(telemetry, "generation_tokens_total", **LABELS) == 11
    count_generation(telemetry, route, Finished(FinishReason.LENGTH, Usage(30, 11), timing))
    assert value(telemetry, "generation_tokens_total", **LABELS) == 11
    assert [seconds for _, seconds in telemetry.first_tokens] == [0.010]
    assert value(telemetry, "time_to_first_token_seconds_sum", **LABELS) == pytest.approx(0.010)
    assert value(telemetry, "inter_token_latency_seconds_sum", **LABELS) == pytest.approx(0.010)
    assert by_exclusive(telemetry.npu_busy) == {}


def test_the_metrics_of_all_tasks_are_there_before_the_first_request(telemetry):
    for api in task_apis():
        if api.metrics is not None:
            telemetry.declare(api.metrics)
    declared = {family.name for family in telemetry.registry.collect()}
    names = ("generation_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds", "embedded_texts")
    assert {
        f"npu_node_{name}" for name in (*names, "embedding_cache_hits", "reranked_documents", "audio_seconds")
    } <= declared
    counted = {"tokens", "texts", "documents", "seconds of audio"}
    assert set(telemetry.made) == counted, "what the dashboard counts"


async def test_a_blocked_event_loop_is_seen(telemetry):
    watcher = asyncio.create_task(telemetry.watch_event_loop())
    await asyncio.sleep(0.03)
    time.sleep(0.4)  # noqa: ASYNC251  (the very thing that is measured)
    await asyncio.sleep(0.03)
    watcher.cancel()
    assert value(telemetry, "event_loop_lag_max_seconds") >= 0.1
