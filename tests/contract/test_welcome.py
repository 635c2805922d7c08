"""What `serve` prints for people: addresses, a call that works, and the models with their state."""

import json
import re
import shlex
import urllib.request
from types import SimpleNamespace

from tests.unit.worker_node.http.test_health import READY, node
from worker_node.cli.serve import welcome

URL = "http://127.0.0.1:8081"


def printed(url, keys=(), failed=(), **models):
    served = node(**models)
    for model in served.manager.models:
        for placement in model.placements:
            placement.emulated = False
    served.manager.failed[:] = failed
    served.settings = SimpleNamespace(api_keys=keys)
    return welcome(url, served)


def test_a_node_with_keys_shows_where_the_key_goes_and_shows_no_key():
    text = printed(URL, keys=("secret-key",), a=[READY])
    assert "-H 'Authorization: Bearer KEY'" in text
    assert "secret-key" not in text


def test_the_call_to_try_is_answered(node):
    command = shlex.split(re.search(r"curl .*", printed(node.url))[0])
    request = urllib.request.Request(command[1], command[command.index("-d") + 1].encode())  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
        assert len(json.load(reply)["embeddings"]) == 1
