"""What the package promises by name, the settings that every option has, and errors that cross processes."""

import copy
import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest

import backend_client
from backend_client import InferenceClient, NPUClient, errors, sync
from backend_client.errors import (
    BatchFailure,
    CloudUnavailable,
    EmbedManyFailed,
    NodeError,
    NPUError,
    NPUUnavailableError,
    StreamInterrupted,
)
from backend_client.results import Attempt
from backend_client.settings import ClientSettings

PUBLIC = """
    ChatResult ClientOptions ClientSettings CloudClient CloudSettings
    ConfigurationError EmbedManyResult EmbedResult GenerateResult InferenceClient InvalidArgument NPUClient NPUError
    NPUUnavailableError NodeStatus RequestRejected RerankResult StreamInterrupted Transcription openai
"""


def test_the_public_names_are_these():
    assert backend_client.__all__ == PUBLIC.split()
    for name in backend_client.__all__:
        assert getattr(backend_client, name) is not None


MODULES = ["cloud", "observability", "sync", "testing"]


def test_public_modules_are_there_once_the_package_is_imported():
    """Each in a fork of its own, for importing one may import another."""
    program = f"""
import os, backend_client
for name in {MODULES}:
    if os.fork() == 0:
        print(getattr(backend_client, name).__name__, flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"backend_client.{name}" for name in MODULES]


def test_the_openai_sdk_is_not_imported_for_those_who_have_no_cloud():
    program = "import sys, backend_client.cli.main; sys.exit('openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# What only one of the two can have: a context manager's methods, and what is about event loops.
ONLY_ASYNC = {"options", "spaces", "cloud_breaker", "register"}
ONLY_BLOCKING = {"inner"}


def public(kind):
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["NPUClient", "InferenceClient"])
def test_both_have_the_same_methods(name):
    waiting, blocking = public(getattr(backend_client, name)), public(getattr(sync, name))
    assert waiting.keys() - ONLY_ASYNC - {"ledger"} == blocking.keys() - ONLY_BLOCKING - {"ledger"}


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


KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, NPUError)]
ATTEMPT = Attempt("http://node:1", "NodeFailed", 0.0, 0.25, status=500, code="internal_error")


def pickled(error):
    return pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)


def make(kind):
    """One error of that class with an attribute set, whatever its constructor takes."""
    error = kind("what happened", node="http://node:1") if issubclass(kind, NodeError) else kind("what happened")
    error.attempts = (ATTEMPT,)
    error.request_id = "req_1"
    return error


@pytest.mark.parametrize("through", [pickled, copy.copy, copy.deepcopy])
def test_every_error_survives_a_copy(through):
    for kind in KINDS:
        error = make(kind)
        copied = through(error)
        assert type(copied) is kind
        assert (str(copied), copied.args, copied.message) == (str(error), error.args, error.message), kind
        assert (copied.attempts, copied.request_id) == ((ATTEMPT,), "req_1"), kind
        assert copied.__dict__.keys() == error.__dict__.keys(), kind


def test_what_an_error_carries_comes_along():
    unavailable = NPUUnavailableError("no node", retry_after=3.0).without_cloud(
        "no cloud", CloudUnavailable("busy", status=429)
    )
    vectors = np.float32([[1, 2], [np.nan, np.nan]])
    error = EmbedManyFailed("some", vectors=vectors, space="s", failures=[BatchFailure(1, 2, unavailable)])
    copied = pickled(error)
    np.testing.assert_array_equal(copied.vectors, vectors)
    assert copied.space == "s"
    [failure] = copied.failures
    assert (failure.start, failure.stop, failure.error.retry_after) == (1, 2, 3.0)
    assert failure.error.cloud_error.status == 429
    assert pickled(StreamInterrupted("cut", partial_text="Par")).partial_text == "Par"


@pytest.mark.parametrize("kind", [k for k in KINDS if not issubclass(k, NodeError)], ids=lambda kind: kind.__name__)
def test_a_serializer_that_keeps_only_the_arguments_can_rebuild_it(kind):
    """Celery's JSON result backend calls the class with `args`."""
    error = make(kind)
    assert kind(*error.args).message == error.message


URL = "http://127.0.0.1:1"


def test_a_client_cannot_be_pickled_and_says_what_to_do():
    with sync.NPUClient([URL]) as blocking:
        for client in (NPUClient([URL]).with_options(timeout=1), InferenceClient.from_settings(nodes=[URL]), blocking):
            for way in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match="build one in each process"):
                    way(client)
        assert copy.copy(blocking).inner is blocking.inner
