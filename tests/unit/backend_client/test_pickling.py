"""Errors cross processes; clients hold connections, and do not."""

import copy
import inspect
import pickle

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    "make",
    [
        lambda: NPUClient([URL]),
        lambda: NPUClient([URL]).with_options(timeout=1),
        lambda: InferenceClient.from_settings(nodes=[URL]),
    ],
)
def test_a_client_cannot_be_pickled_and_says_what_to_do(make):
    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="build one in each process"):
            way(make())


def test_a_blocking_client_cannot_be_pickled():
    with sync.NPUClient([URL]) as client:
        with pytest.raises(TypeError, match="NPUClient cannot be pickled"):
            pickle.dumps(client)
        assert copy.copy(client).inner is client.inner
