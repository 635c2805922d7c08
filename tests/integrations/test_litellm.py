"""LiteLLM, in an environment of its own, against a real node on real weights."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.foreign import environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

HERE = Path(__file__).parent / "environments"


def test_litellm(whole_node):
    # More than 5 s: LiteLLM takes long to import, and its environment minutes to install, once for each machine.
    done = subprocess.run(
        [environment(HERE / "litellm.txt"), HERE / "litellm_calls.py"],
        env=os.environ | {"NODE_URL": whole_node.url},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("all is as it should be")
