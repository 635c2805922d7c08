"""The checks of a certification, on scripted answers."""

from types import SimpleNamespace

import pytest

from worker_node.certify import checks, inputs, run
from worker_node.certify.checks import QUICK, Certification, Failed
from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.devices.probe import Probe
from worker_node.settings import ModelSettings, NodeSettings

ENGINE = {"device": "NPU", "prompt_limit": 128, "total_limit": 128, "restarts": 0}


def ranking(scores):
    return SimpleNamespace(
        model=lambda: {"kind": "rerank", "engines": [ENGINE]},
        scores=lambda _query, documents: [scores(place) for place in range(len(documents))],
    )


def order(scores):
    return Certification(ranking(scores), ranking(lambda place: place / 10), QUICK, lambda _text: None).order()


def test_documents_in_another_order_than_the_cpus_fail_the_agreement():
    with pytest.raises(Failed, match=r"documents 1 and 0 .* are not in the CPU's order"):
        order(lambda place: -place)


def test_other_scores_in_the_cpus_order_agree():
    detail, _ = order(lambda place: place * 7)
    assert "as the CPU does" in detail


def test_a_length_whose_second_prompt_is_answered_wrongly_is_over_the_limit():
    right, wrong = 1, 2
    window = 400
    shorter = max(length for length in inputs.lengths(window, QUICK.prompts) if length < window)

    def tokenize(text):
        return list(text.encode())

    def complete(prompt, count, *, logprobs):
        """The device answers rightly to the first prompt of each length below the window, and to short ones."""
        first = len(prompt) < window and prompt == inputs.prompt(len(prompt), 0, tokenize)
        return [right if first or len(prompt) <= shorter else wrong] * count, []

    engine = ENGINE | {"prompt_limit": window, "total_limit": 1024}
    node = SimpleNamespace(
        model=lambda: {"kind": "generation", "engines": [engine]}, tokenize=tokenize, complete=complete
    )
    cpu = SimpleNamespace(continuation=lambda _prompt: [([right, wrong], [0.0, -9.0])] * 4)
    examined = Certification(node, cpu, QUICK, lambda _text: None)
    examined.answers()
    examined.largest_prompt()
    assert examined.limit == shorter


@pytest.mark.parametrize(
    ("before", "growth", "grew"), [(100, 199, False), (100, 201, True), (1000, 249, False), (1000, 251, True)]
)
def test_an_engine_may_grow_by_200_mb_or_by_a_quarter_if_that_is_more(monkeypatch, before, growth, grew):
    sizes = iter([before * 2**20, (before + growth) * 2**20])
    monkeypatch.setattr(checks, "resident_memory", lambda _pid: next(sizes))
    engine = ENGINE | {"pid": 7}
    node = SimpleNamespace(model=lambda: {"kind": "rerank", "engines": [engine]}, post=lambda *_: {})
    examined = Certification(node, None, QUICK, lambda _text: None)
    if grew:
        with pytest.raises(Failed, match=f"the engine grew by {growth} MB"):
            examined.memory()
    else:
        assert examined.memory()[1]["growth_bytes"] == growth * 2**20


def test_a_model_of_a_kind_without_checks_is_refused(monkeypatch):
    installed = SimpleNamespace(id="counter", kind="counting")
    monkeypatch.setattr(run, "installed_model", lambda *_: installed)
    wanted = run.Run(NodeSettings(), ModelSettings(name="counter"), Device.CPU, Probe((), ""), QUICK)
    with pytest.raises(ConfigurationError, match="no checks of counting models, only of embedding, "):
        run.certify(wanted, lambda _text: None)
