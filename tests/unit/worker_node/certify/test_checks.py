"""The checks of a certification, on scripted answers."""

from types import SimpleNamespace

import pytest

from worker_node.certify import run
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


def test_a_model_of_a_kind_without_checks_is_refused(monkeypatch):
    installed = SimpleNamespace(id="counter", kind="counting")
    monkeypatch.setattr(run, "installed_model", lambda *_: installed)
    wanted = run.Run(NodeSettings(), ModelSettings(name="counter"), Device.CPU, Probe((), ""), QUICK)
    with pytest.raises(ConfigurationError, match="no checks of counting models, only of embedding, "):
        run.certify(wanted, lambda _text: None)
