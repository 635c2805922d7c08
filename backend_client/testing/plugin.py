"""A pytest plugin: `pytest_plugins = ["backend_client.testing.plugin"]` in the top conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend_client.testing.fleet import FakeFleet


@pytest.fixture
def fake_fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFleet]:
    """Two fake nodes, which clients made from settings call."""
    with FakeFleet(2) as fleet:
        for name, value in fleet.environment().items():
            monkeypatch.setenv(name, value)
        yield fleet
