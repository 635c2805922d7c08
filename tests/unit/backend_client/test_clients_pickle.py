"""Clients hold connections and are not sent to other processes; views and copies stay in this one."""

import copy
import pickle

import pytest

from backend_client import InferenceClient, NPUClient, sync

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


def test_a_copy_shares_the_connections():
    client = NPUClient([URL])
    assert copy.copy(client).core is client.with_options(timeout=1).core is client.core
