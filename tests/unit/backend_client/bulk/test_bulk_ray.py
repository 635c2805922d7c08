"""Joining a Ray cluster, with a stand-in for Ray: real clusters are in tests/integrations/test_bulk_environments.py."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from backend_client.bulk import BulkRequest
from backend_client.bulk.ray_executor import RayExecutor
from backend_client.errors import NPUUnavailableError
from backend_client.settings import ClientSettings

REQUEST = BulkRequest(kind="embed", source="in", out="out", column="text", patience=0.0)


async def test_a_cluster_without_a_machine_for_the_work_ends_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0}, remote=mock.Mock()))
    with pytest.raises(NPUUnavailableError, match="no machine of the Ray cluster had the resource intel_npu"):
        await RayExecutor(REQUEST, ()).probe(None)


@pytest.mark.parametrize(("mode", "warnings"), [("token", 0), ("", 1)])
async def test_a_cluster_without_token_authentication_is_joined_with_a_warning(monkeypatch, caplog, mode, warnings):
    joined = []
    ray = SimpleNamespace(init=lambda **given: joined.append(given["address"]), remote=mock.Mock())
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    executor = await RayExecutor.connect("10.0.0.1:6379", REQUEST, ClientSettings())
    assert executor.slots == 0
    assert joined == ["10.0.0.1:6379"]
    assert [("can run code on all" in record.message) for record in caplog.records] == [True] * warnings
