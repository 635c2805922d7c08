"""What Intel's compiler predicts stands beside what was measured, and is never taken for it."""

import pytest

from worker_node.certify.checks import QUICK, Certification
from worker_node.certify.predictions import Prediction, predictions_for
from worker_node.models.catalog import Catalog

PREDICTED = [
    Prediction("m", "int4_sym", "4000", 16, (2.45, 1.3)),
    Prediction("m", "int4_sym", "4000", 256, (7.0, 3.7)),
    Prediction("m", "int4_sym", "4000", 1024, (900.0, 480.0), (12.3, 22.7)),
]


class ScriptedNode:
    """A node whose placement on an NPU takes a third of a second for a token."""

    id = "m"

    def __init__(self, kind, prompt_limit=1024):
        engine = {"device": "NPU", "prompt_limit": prompt_limit, "total_limit": prompt_limit + 128, "restarts": 0}
        self._model = {"kind": kind, "engines": [engine]}
        self.busy = 0

    def model(self):
        return self._model

    def tokenize(self, text):
        return list(range(len(text.split())))

    def stream(self, _prompt, _count):
        return [1.0, 1.5, 2.0]

    def health(self):
        return {"npu": {"busy_time_us": self.busy, "reasons": {}}}

    def post(self, _route, _body):
        return {"_busy_us": 100, "usage": {"prompt_tokens": 17}, "data": [{"embedding": [1.0]}]}


def certification(node, predictions=PREDICTED):
    return Certification(node, None, QUICK, lambda _text: None, predictions)


def test_the_predicted_rate_of_a_writer_stands_beside_the_measured_one():
    made = certification(ScriptedNode("generation"))
    detail, values = made.times()
    assert "then 2.0 tokens per second; Intel's compiler predicts 12.3 to 22.7 tokens per second" in detail
    assert values["predicted_tokens_per_s"] == (12.3, 22.7)
    assert made.rates["tokens_per_s"] == 2.0


@pytest.mark.parametrize(
    ("prompt_limit", "predictions"), [(512, PREDICTED), (1024, ())], ids=["another window", "no prediction"]
)
def test_nothing_is_predicted_for_what_was_not_compiled(prompt_limit, predictions):
    detail, values = certification(ScriptedNode("generation", prompt_limit), predictions).times()
    assert "predicts" not in detail
    assert values["predicted_tokens_per_s"] is None


def test_the_busy_time_of_a_text_is_compared_with_the_length_that_it_runs_in():
    detail, values = certification(ScriptedNode("embedding")).busy_counter()
    assert detail.endswith("; Intel's compiler predicts 3.7 to 7 ms")
    assert values["predicted_ms"] == (7.0, 3.7)


def test_predictions_are_of_models_of_the_catalog_and_of_their_weights():
    catalog = Catalog.load()
    entry = catalog.find("all-minilm-l6-v2")
    found = predictions_for(entry.id, entry.quantization, "4000")
    assert [each.tokens for each in found] == sorted(each.tokens for each in found) != []
    assert all(slow > fast > 0 for slow, fast in (each.ms for each in found))
    assert (
        predictions_for(entry.id, "int8_sym", "4000") == predictions_for(entry.id, entry.quantization, "emulated") == []
    )
