"""Cross-encoders become reranking models that compute what their files say, against BERT in plain numpy."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import openvino as ov
import pytest
from tokenizers import Tokenizer

from tests.support.cross_encoders import write_tiny
from tests.support.numpy_bert import bert_logits, roberta_logits
from tests.support.published import install
from tests.support.task_engine import TaskEngine
from tests.support.task_engine import encoded as scored
from worker_node.core.errors import ConversionFailed
from worker_node.engines.process import CanaryFailed
from worker_node.models.directory import read_canary
from worker_node.models.store import ModelStore
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.rerank.service import SERVING
from worker_node.tasks.rerank.task import RerankCanary

pytestmark = pytest.mark.slow

PAIRS = [("how tall is it", "the tower is 330 metres tall"), ("cats", "the cat sat."), ("a", "b c d e f g h")]


@pytest.fixture
def converted(in_process, store_root):
    return partial(install, ModelStore())


def encoded(model, query, document):
    return Tokenizer.from_file(str(model.path / "tokenizer.json")).encode(query, document)


def logits(model, pairs):
    """The logits of pairs as the model's graph computes them in float32: all in one padded batch."""
    rows = [encoded(model, *pair) for pair in pairs]
    length = max(len(row.ids) for row in rows)
    graph = ov.Core().read_model(model.path / "openvino_model.xml")
    names = {port.any_name for port in graph.inputs}
    values = {name: np.zeros((len(rows), length), np.int64) for name in names}
    for index, row in enumerate(rows):
        count = len(row.ids)
        known = {"input_ids": row.ids, "attention_mask": [1] * count, "token_type_ids": row.type_ids}
        for name in names:
            values[name][index, :count] = known[name]
    compiled = ov.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled(values)["logits"]


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [
        ("BertForSequenceClassification", 1),
        ("RobertaForSequenceClassification", 2),
        ("XLMRobertaForSequenceClassification", 1),
    ],
)
def test_every_architecture_is_built_as_its_paper_says(tmp_path, converted, architecture, labels):
    tensors = write_tiny(tmp_path / "source", architecture=architecture, labels=labels)
    model = converted(tmp_path / "source")
    rows = [encoded(model, *pair) for pair in PAIRS]
    if architecture == "BertForSequenceClassification":
        expected = [bert_logits(tensors, 4, row.ids, row.type_ids) for row in rows]
        assert model.context_limit == 64
    else:
        expected = [roberta_logits(tensors, 4, row.ids) for row in rows]
        assert model.context_limit == 62, "the first two positions are the padding's"
    found = logits(model, PAIRS)
    assert found.shape == (3, labels)
    assert found == pytest.approx(np.stack(expected), abs=1e-4)


def test_an_export_in_openvino_form_is_taken_as_it_is(tmp_path, converted):
    write_tiny(tmp_path / "published", labels=2)
    built = converted(tmp_path / "published")
    export = tmp_path / "export"
    export.mkdir()
    for name in ("openvino_model.xml", "openvino_model.bin", "tokenizer.json"):
        (export / name).write_bytes((built.path / name).read_bytes())
    (export / "config.json").write_bytes((tmp_path / "published/config.json").read_bytes())
    model = converted(export)
    assert model.kind == "rerank"
    assert logits(model, PAIRS) == pytest.approx(logits(built, PAIRS), abs=1e-6)


class Reranker(TaskEngine):
    """Answers with the logits of these known pairs, `off` by so much."""

    def __init__(self, known, off):
        self.known, self.off = known, off

    async def embed(self, tokens, *, deadline, interactive):
        return scored(np.asarray(self.known.logits, np.float32) + self.off)


async def test_a_reranking_engine_is_examined_with_the_known_logits(tmp_path, converted):
    write_tiny(tmp_path / "source")
    installed, wanted = converted(tmp_path / "source"), ModelSettings(name="m")
    model = SERVING.open(installed, wanted, NodeSettings())
    canary = SERVING.canary(model, wanted, SimpleNamespace(prompt_limit=installed.context_limit))
    known = read_canary(installed.path, RerankCanary)
    await canary(Reranker(known, 0.0))
    for off in (2 * known.tolerance, np.nan):
        with pytest.raises(CanaryFailed, match="from the known one"):
            await canary(Reranker(known, off))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id2label": {"0": "no", "1": "perhaps", "2": "yes"}}, "3 labels; a reranker has one, or two"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not known"),
        ({"num_hidden_layers": 1}, r"tensors that the network has no place for: .*bert.encoder.layer.1"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_option(tmp_path, converted, change, message):
    write_tiny(tmp_path / "source")
    config = json.loads((tmp_path / "source/config.json").read_text())
    (tmp_path / "source/config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConversionFailed, match=message):
        converted(tmp_path / "source")
