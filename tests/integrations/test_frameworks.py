"""Frameworks in common use, each in an environment of its own, run unmodified against a real node on real weights.

The scripts in `frameworks/` use chat, streams, tools with nested schemas, structured output and a second turn. What a
small model answers is its own affair: they assert that requests pass, and the form of what is enforced.
"""

from pathlib import Path

import pytest

from tests.support.foreign import environment, npm_packages, output_of
from tests.support.gateway import WAYS, reached

# Each installs up to 100 packages on the first run, and some take a minute to import and run.
pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
PYTHON_FRAMEWORKS = sorted(path.stem.removesuffix("_calls") for path in (HERE / "frameworks").glob("*_calls.py"))


@pytest.fixture(scope="module", params=WAYS)
def node(request, whole_node):
    """What is asked here is answered in words, by the node itself and through the gateway."""
    with reached(whole_node, request.param) as node:
        yield node


@pytest.mark.parametrize("name", PYTHON_FRAMEWORKS)
def test_framework(node, store, name):
    # A load generator makes its prompts of random tokens, with any tokenizer.
    tokenizer = str(store.get("all-minilm-l6-v2").path)
    python = environment(HERE / "environments" / f"{name}.txt")
    told = output_of(python, HERE / "frameworks" / f"{name}_calls.py", NODE_URL=node.url, TOKENIZER=tokenizer)
    assert told.endswith("all as expected\n")


def test_ai_sdk(node):
    script = npm_packages(HERE / "frameworks" / "package.json") / "ai_sdk_calls.mjs"
    script.write_bytes((HERE / "frameworks" / "ai_sdk_calls.mjs").read_bytes())
    assert output_of("node", script, NODE_URL=node.url).endswith("all as expected\n")
