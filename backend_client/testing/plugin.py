"""A pytest plugin: `pytest_plugins = ["backend_client.testing.plugin"]` in the top conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend_client.testing.fleet import FakeCloud, FakeFleet


@pytest.fixture
def fake_fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFleet]:
    """Fake nodes, which clients made from settings call.

    There are two, or as many as `@pytest.mark.parametrize("fake_fleet", [3], indirect=True)` says.
    """
    with FakeFleet(getattr(request, "param", 2)) as fleet:
        for name, value in fleet.environment().items():
            monkeypatch.setenv(name, value)
        yield fleet


@pytest.fixture
def fake_cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    """A fake cloud, to which clients made from settings fall back."""
    with FakeCloud() as cloud:
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        yield cloud
