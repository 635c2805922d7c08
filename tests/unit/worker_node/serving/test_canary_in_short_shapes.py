"""Shapes of the NPU that hold only some of the known texts: examined with those, or refused by name, never a crash."""

import numpy as np
import pytest

from tests.support.task_engine import TaskEngine, encoded
from worker_node.core.errors import ConfigurationError
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.engines.process import CanaryFailed
from worker_node.serving.build import Machine, build_model
from worker_node.settings import ModelSettings, NodeSettings

EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"


def built(store, name, tmp_path, **wanted):
    npu = NpuSource(emulated=True, busy_counter=tmp_path / "busy", stand_in=True)
    machine = Machine(NodeSettings(compile_cache=tmp_path), Probe((DeviceInfo("CPU"),), "test"), npu)
    wanted.setdefault("placements", ("NPU", "CPU"))
    return build_model(store.get(name), ModelSettings(name=name, **wanted), machine)


class Engine(TaskEngine):
    """Answers with the known vectors of the texts that it is given, `off` by so much."""

    def __init__(self, model, off):
        known = model.installed.canary
        self.vectors = {
            len(row): vector
            for row, vector in zip(model.tokenizer.rows(known.texts, truncate=False), known.vectors, strict=True)
        }
        self.off, self.lengths = off, []

    async def embed(self, tokens, *, deadline, interactive):
        self.lengths = [len(row) for row in tokens]
        vectors = np.asarray([self.vectors[len(row)] for row in tokens], np.float32)
        return encoded(vectors + self.off)


@pytest.mark.parametrize(("bucket", "texts"), [(16, 4), (256, 5)])
async def test_an_engine_is_examined_with_the_known_texts_that_fit_its_longest_bucket(bucket, texts, store, tmp_path):
    model = built(store, EMBEDDER, tmp_path, npu_buckets=[bucket])
    on_npu, on_cpu = model.placements
    engine = Engine(model, 0.0)
    await on_npu.engine._canary(engine)
    assert len(engine.lengths) == texts
    assert max(engine.lengths) <= bucket
    await on_cpu.engine._canary(engine)
    assert len(engine.lengths) == 5, "the other placement is examined with all"
    for off in (0.5, np.nan):
        with pytest.raises(CanaryFailed):
            await on_npu.engine._canary(Engine(model, off))


def test_a_bucket_that_holds_fewer_than_two_known_texts_is_refused_with_the_least_length(store, tmp_path):
    with pytest.raises(ConfigurationError, match=r"npu_buckets: the longest has 8 .* at least 9 is needed"):
        built(store, EMBEDDER, tmp_path, npu_buckets=[8])
    built(store, EMBEDDER, tmp_path, npu_buckets=[9])


def test_a_prompt_limit_below_the_known_question_is_refused_with_the_least_length(store, tmp_path):
    with pytest.raises(ConfigurationError, match=r"prompts of 16 tokens, and \d+ are needed") as refused:
        built(store, WRITER, tmp_path, max_prompt_len=16)
    least = int(str(refused.value).split("tokens, and ")[1].split()[0])
    built(store, WRITER, tmp_path, max_prompt_len=least)
