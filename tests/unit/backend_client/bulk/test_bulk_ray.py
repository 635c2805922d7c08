"""Joining a Ray cluster, with a stand-in for Ray: real clusters are in tests/integrations/test_bulk_environments.py."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from backend_client.bulk import BulkRequest
from backend_client.bulk.ray_executor import RayExecutor
from backend_client.settings import ClientSettings


@pytest.mark.parametrize(("mode", "warnings"), [("token", 0), ("", 1)])
async def test_a_cluster_without_token_authentication_is_joined_with_a_warning(monkeypatch, caplog, mode, warnings):
    joined = []
    ray = SimpleNamespace(init=lambda **given: joined.append(given["address"]), remote=mock.Mock())
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    request = BulkRequest(kind="embed", source="in", out="out", column="text")
    await RayExecutor.connect("10.0.0.1:6379", request, ClientSettings())
    assert joined == ["10.0.0.1:6379"]
    assert [("can run code on all" in record.message) for record in caplog.records] == [True] * warnings
