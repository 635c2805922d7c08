"""Drivers over two nodes and a data set whose output is known."""

import pytest

from backend_client.testing import FakeFleet
from tests.faults.bulk.data_sets import make_input
from tests.faults.bulk.drivers import Drivers


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    with FakeFleet(2) as fleet:
        source = tmp_path_factory.mktemp("data") / "in"
        texts = make_input(source)
        yield Drivers(fleet.environment()), source, texts


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.delenv("NPU_CLIENT_CONFIG", raising=False)
    with FakeFleet(2) as fleet:
        for name, value in fleet.environment().items():
            monkeypatch.setenv(name, value)
        yield fleet
