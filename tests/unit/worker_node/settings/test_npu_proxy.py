"""Variables of npu-proxy: taken over where they mean the same, answered where not, and never stronger than our own."""

import pytest

from worker_node.settings.node import NodeSettings
from worker_node.settings.reading import (
    _INSTEAD,
    _SAME,
    NPU_PROXY_PREFIX,
    InvalidSettings,
    inherited,
    notices,
    parse_settings,
)


def test_what_means_the_same_is_taken_over(monkeypatch):
    monkeypatch.setenv("NPU_PROXY_PORT", "8099")
    monkeypatch.setenv("NPU_PROXY_TOKEN_LIMIT", "1500")
    monkeypatch.setenv("NPU_PROXY_ALLOWED_HOSTS", "npu.example,other.example")
    settings = parse_settings("")
    assert (settings.port, settings.npu_token_limit) == (8099, 1500)
    assert settings.allowed_hosts == ("npu.example", "other.example")


@pytest.mark.parametrize(
    ("text", "variables", "flags"), [("port = 1", {}, {}), ("", {"NPU_NODE_PORT": "1"}, {}), ("", {}, {"port": 1})]
)
def test_our_own_words_are_stronger(monkeypatch, text, variables, flags):
    monkeypatch.setenv("NPU_PROXY_PORT", "8099")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parse_settings(text, flags=flags).port == 1


def test_a_wrong_value_is_reported_under_its_own_name(monkeypatch):
    monkeypatch.setenv("NPU_PROXY_PORT", "high")
    with pytest.raises(InvalidSettings, match="NPU_PROXY_PORT: port: "):
        parse_settings("")


def test_each_variable_gets_one_notice():
    told = notices(
        {"NPU_PROXY_PORT": "1", "NPU_PROXY_DEVICE": "NPU", "NPU_PROXY_NEW": "x", "NPU_PROXY_HOST": "", "A": "b"}
    )
    assert len(told) == 3
    assert "NPU_PROXY_PORT is npu-proxy's; it is understood as NPU_NODE_PORT: rename it" in told
    assert any("placements" in line for line in told)


def test_every_setting_that_is_named_exists():
    assert set(_SAME.values()) <= set(NodeSettings.model_fields)
    assert not _SAME.keys() & _INSTEAD.keys()
    assert inherited({NPU_PROXY_PREFIX + "HOST": ""}) == {}
