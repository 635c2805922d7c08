"""Several texts in one row of a static shape have the vectors that each of them has by itself."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from worker_node.core.types import Device
from worker_node.devices.emulated_npu import StandInCounter
from worker_node.encoders.jobs import RowResult, row_job
from worker_node.engines.protocol import EngineSpec, NativeCall
from worker_node.models.convert.encoder import (
    Pooling,
    SentenceConfig,
    build_encoder,
    read_bert_config,
    read_sentence_config,
    read_tensors,
)
from worker_node.tasks.embed.options import StaticOptions
from worker_node.tasks.embed.packing import CannotPack, StaticEmbeddingRunner, packed_encoder

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
FAR = 1e12
# One of a single token, equal ones, and one whose beginning is another's.
TEXTS = ([2, 5, 9, 30, 3], [7], [2, *range(4, 20), 3], [2, 3], [2, 5, 9, 30, 3], [2, 5, 9])


def build(directory, pooling=None, *, normalise=True):
    sentence = read_sentence_config(directory)
    if pooling is not None:
        sentence = SentenceConfig(pooling=pooling, normalise=normalise, max_tokens=sentence.max_tokens)
    return build_encoder(read_bert_config(directory), sentence, read_tensors(directory / "model.safetensors"))


def alone(model, texts):
    """The vector of each text, run by itself without padding."""
    compiled = ov.compile_model(model, "CPU", F32)
    rows = [{"input_ids": np.array([text]), "attention_mask": np.ones((1, len(text)), np.int64)} for text in texts]
    return np.concatenate([compiled(row)["embedding"] for row in rows])


def row_of(texts, length):
    row = {name: np.zeros((1, length), np.int64) for name in ("input_ids", "position_ids", "segment_ids")}
    start = 0
    for number, text in enumerate(texts, 1):
        place = (0, slice(start, start + len(text)))
        row["input_ids"][place], row["position_ids"][place], row["segment_ids"][place] = text, range(len(text)), number
        start += len(text)
    return row


def cosines(ones, others):
    lengths = np.linalg.norm(ones, axis=1) * np.linalg.norm(others, axis=1)
    return np.einsum("nd,nd->n", ones, others) / lengths


@pytest.mark.parametrize(
    ("pooling", "normalise", "length"),
    [(Pooling.MEAN, True, 36), (Pooling.MEAN, False, 48), (Pooling.CLS, True, 48), (Pooling.LAST, False, 36)],
    ids=["mean, full row", "mean, not normalised", "first", "last, full row, not normalised"],
)
def test_a_packed_text_has_the_vector_that_it_has_alone(make_bert, pooling, normalise, length):
    directory, _ = make_bert()
    expected = alone(build(directory, pooling, normalise=normalise), TEXTS)
    packed = packed_encoder(build(directory, pooling, normalise=normalise), length, 8)
    vectors = ov.compile_model(packed, "CPU", F32)(row_of(TEXTS, length))["embedding"]
    assert vectors.shape == (8, 32)
    assert cosines(vectors[: len(TEXTS)], expected).min() >= 0.99999
    np.testing.assert_allclose(vectors[: len(TEXTS)], expected, atol=1e-5)
    assert not vectors[len(TEXTS) :].any(), "texts that are not there"


def test_other_texts_of_the_row_do_not_change_a_vector(make_bert):
    directory, _ = make_bert()
    compiled = ov.compile_model(packed_encoder(build(directory), 48, 8), "CPU", F32)
    first = compiled(row_of(TEXTS, 48))["embedding"].copy()
    other = compiled(row_of([TEXTS[0], [11] * 20, TEXTS[2]], 48))["embedding"]
    np.testing.assert_allclose(other[[0, 2]], first[[0, 2]], atol=1e-6)


def test_graphs_of_another_kind_are_refused_by_what_they_lack(make_bert):
    ids, mask = (op.parameter([-1, -1], np.int64) for _ in range(2))
    for port, name in ((ids, "input_ids"), (mask, "attention_mask")):
        port.output(0).set_names({name})
    table = op.constant(np.ones((9, 4), np.float32))
    words = op.gather(table, ids, op.constant(np.int64(0)))
    mean = op.reduce_mean(words, op.constant(np.int64(1)))
    with pytest.raises(CannotPack, match="made by ReduceMean"):
        packed_encoder(ov.Model([op.result(mean)], [ids, mask], "other"), 16, 2)
    directory, _ = make_bert()
    with pytest.raises(CannotPack, match="inputs are input_ids, position_ids, segment_ids"):
        packed_encoder(packed_encoder(build(directory), 16, 2), 16, 2)


@pytest.fixture
def runner(make_bert):
    """The runner on the emulated NPU, with the vectors that it is to give, in f32."""
    directory, _ = make_bert()
    ov.save_model(build(directory), directory / "openvino_model.xml", compress_to_fp16=False)
    counter = StandInCounter()
    options = {"npu_buckets": [16, 32, 48], "busy_counter": str(counter.path), "stand_in": True}
    options |= {"npu_packing": True, "plugin_config": F32}
    spec = EngineSpec("tiny", "embedding", str(directory), Device.NPU, "", options, emulated=True)
    runner = StaticEmbeddingRunner(spec)
    runner.load()
    yield runner, lambda texts: alone(build(directory), texts)
    runner.close()
    counter.close()


def run(runner, *jobs):
    """The events of the jobs, all submitted before the first step."""
    events = []
    for job in jobs:
        runner.submit(job)
    while runner.has_work:
        runner.step(events.append, lambda: None)
    return events


def job(number, texts, *, interactive=True):
    return row_job(texts, FAR, interactive=interactive).with_id(number)


def test_texts_of_several_requests_share_rows_on_the_npu(runner):
    runner, expected = runner
    texts = [list(range(4, 4 + n)) for n in (3, 30, 9, 9, 17, 5, 40, 2)]
    events = run(runner, job(1, texts[:5]), job(2, texts[5:]))
    vectors = {e.id: np.frombuffer(e.data, "<f4").reshape(-1, 32) for e in events if isinstance(e, RowResult)}
    np.testing.assert_allclose(np.concatenate([vectors[1], vectors[2]]), expected(texts), atol=1e-5)
    shapes = [event.units for event in events if isinstance(event, NativeCall)]
    # 115 tokens: eight runs of 16 to 48 tokens before, 240 in all.
    assert sum(shapes) <= 160
    assert len(shapes) < len(texts) / 2


def test_a_text_alone_runs_in_the_shortest_row(runner):
    runner, expected = runner
    events = run(runner, job(1, [[4, 5, 6]]))
    assert [event.units for event in events if isinstance(event, NativeCall)] == [16]
    np.testing.assert_allclose(np.frombuffer(events[-1].data, "<f4")[None], expected([[4, 5, 6]]), atol=1e-5)


def test_a_cancelled_request_leaves_the_vectors_of_its_row_mates_alone(runner):
    runner, expected = runner
    for number in (1, 2, 3):
        runner.submit(job(number, [[3 + number] * 4, [9, number]]))
    runner.cancel(2)
    vectors = {e.id: np.frombuffer(e.data, "<f4").reshape(-1, 32) for e in run(runner) if isinstance(e, RowResult)}
    assert set(vectors) == {1, 3}
    for number, found in vectors.items():
        np.testing.assert_allclose(found, expected([[3 + number] * 4, [9, number]]), atol=1e-5)


def test_blobs_without_packing_are_described_as_before_there_was_any():
    assert "npu_packing" not in StaticOptions(npu_buckets=(16,)).compiled_in()
    assert StaticOptions(npu_buckets=(16,), npu_packing=True).compiled_in()["npu_packing"] is True
