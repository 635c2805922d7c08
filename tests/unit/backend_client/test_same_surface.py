"""The blocking clients have the methods of the asynchronous ones, with the same parameters."""

import inspect

import pytest

import backend_client
from backend_client import sync
from backend_client.settings import ClientSettings

# What only one of the two can have: a context manager's methods, and what is about event loops.
ONLY_ASYNC = {"backend", "core", "options", "spaces", "wrap_backend", "npu", "cloud_breaker"}
ONLY_BLOCKING = {"inner"}


def public(kind):
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["NPUClient", "InferenceClient"])
def test_both_have_the_same_methods(name):
    waiting, blocking = public(getattr(backend_client, name)), public(getattr(sync, name))
    assert waiting.keys() - ONLY_ASYNC - {"ledger"} == blocking.keys() - ONLY_BLOCKING - {"ledger"}


def test_the_clients_are_made_with_the_same_parameters():
    ours = inspect.signature(sync.NPUClient).parameters
    theirs = inspect.signature(backend_client.NPUClient).parameters
    assert list(ours) == list(theirs)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NPU_CLIENT_NODE", "NPU_CLIENT_NODES"),
        ("NPU_CLIENT_TIMEOUTS__EMBEDD", "NPU_CLIENT_TIMEOUTS__EMBED"),
        ("NPU_CLIENT_CLOUD__CHATMODEL", "NPU_CLIENT_CLOUD__CHAT_MODEL"),
        ("NPU_CLIENT_RETRY__ATEMPTS", "NPU_CLIENT_RETRY__ATTEMPTS"),
    ],
)
def test_a_misspelt_variable_is_rejected_with_the_nearest_name(monkeypatch, name, nearest):
    monkeypatch.setenv(name, "1")
    with pytest.raises(backend_client.ConfigurationError, match=f"{name}: .*did you mean {nearest}"):
        ClientSettings.load()


def test_every_option_of_a_client_can_be_set_by_settings_and_is_checked(monkeypatch):
    monkeypatch.setenv("NPU_CLIENT_RETRY__ATTEMPTS", "2")
    monkeypatch.setenv("NPU_CLIENT_SPACES__some_model", "space-a")
    options = ClientSettings.load(connections_per_node=7).options()
    assert (options.retry.attempts, options.connections_per_node, options.retry.pause) == (2, 7, 0.05)
    with pytest.raises(backend_client.ConfigurationError, match="retry"):
        ClientSettings.load(retry={"attempts": 0})
    with pytest.raises(backend_client.ConfigurationError, match="retry"):
        ClientSettings.load(retry={"unknown": 1})
    client = backend_client.NPUClient.from_settings(nodes=["http://a:1"], timeouts={"embed": 3})
    assert client.options.timeouts.embed == 3
    same = ClientSettings(nodes=["http://b:1"])
    assert repr(backend_client.NPUClient.from_settings(same, local_only=True)) == "NPUClient(['http://b:1'])"
