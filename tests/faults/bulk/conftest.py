"""Drivers over two nodes and a data set whose output is known."""

import pytest

from backend_client.testing import FakeFleet
from tests.faults.bulk.data_sets import make_input
from tests.faults.bulk.drivers import drivers


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    with FakeFleet(2) as fleet, drivers(fleet.environment()) as started:
        source = tmp_path_factory.mktemp("data") / "in"
        texts = make_input(source)
        yield started, source, texts


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.delenv("NPU_CLIENT_CONFIG", raising=False)
    with FakeFleet(2) as fleet:
        for name, value in fleet.environment().items():
            monkeypatch.setenv(name, value)
        yield fleet
